"""`polyquant report`: checkpoints side by side on one page. gather.py collects, charts.py draws, page.py writes."""
