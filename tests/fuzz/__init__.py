"""Fuzzing of the loaders: mutated files of every format end in a model or in one line.

    python -m tests.fuzz                     20,000 inputs, in worker processes
    python -m tests.fuzz --runs 500 --seed 7
    python -m tests.fuzz --only 1234         one input again, with its traceback

``corpus/`` holds small real files of each format; ``python -m tests.fuzz.corpus`` writes them
afresh. Input ``i`` of a seed is always the same bytes.
"""
