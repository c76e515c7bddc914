"""The harness of all experiments: a grid of runs, raw data, a page drawn from it, and its check.

An experiment of the paper's evaluation, of the lab and of the benchmarks is an ``Experiment``: its
stages hold cells, ``run`` makes every cell's runs in rounds and stores their results, ``draw``
makes a page of the results, and ``check`` compares a rerun with recorded results.
"""
