"""`polyquant sweep`: make, measure and compare many quantizations of one model.

candidates.py names them, forecast.py plans them, run.py makes and measures each in its own processes (process.py,
child.py) and records every step in the work folder (folder.py); scores.py compares with the stored logits of the
source, advice.py chooses among the trials (trials.py), and overview.py makes the results (results.py) a report.
"""
