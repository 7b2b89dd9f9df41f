"""Engines: run the tasks of a conversion on the workers of a cluster (Ray, Dask).

driver.py        plans, hands out units of work with leases, collects the results, publishes the output
worker.py        one worker process: opens the source, makes the same plan, runs units
cluster.py       the interface between the two, and the names of the engines
ray_cluster.py   dask_cluster.py
"""
