"""The exchanges in numpy, by one process that sees all ranks: rows moved one at a time, as defined."""

import numpy as np


def before(numbers):
    return [sum(numbers[:i]) for i in range(len(numbers))]


def dispatch(inputs, splits, outs, align):
    """`splits[p][q * e + x]` rows of rank p go to expert x of rank q. Fills `outs`; splits, offsets."""
    n = len(inputs)
    experts = len(splits[0]) // n
    results = []
    for r in range(n):
        rows, offsets, start = [], [], 0
        for x in range(experts):
            place = start
            for p in range(n):
                count, first = splits[p][r * experts + x], before(splits[p])[r * experts + x]
                for i in range(count):
                    outs[r][place + i] = inputs[p][first + i]
                rows.append(count)
                offsets.append(place)
                place += count
            length = place - start
            if align is not None:
                while length == 0 or length % align:
                    length += 1
            start += length
        results.append(np.array([rows, offsets]))
    return results


def combine(inputs, splits_offsets, outs):
    """`splits_offsets[p][:, x * n + q]`: rows of rank p's expert x that go back to rank q, and from where."""
    n = len(inputs)
    experts = splits_offsets[0].shape[1] // n
    results = []
    for r in range(n):
        rows, offsets, place = [], [], 0
        for p in range(n):
            for x in range(experts):
                count, first = splits_offsets[p][:, x * n + r]
                for i in range(count):
                    outs[r][place + i] = inputs[p][first + i]
                rows.append(count)
                offsets.append(place)
                place += count
        results.append(np.array([rows, offsets]))
    return results
