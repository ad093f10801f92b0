"""Sums over pairs of whole numbers for 16 vectors at once, as instructions for LLVM (numba).

One instruction multiplies a pair of 16-bit numbers for each of 16 vectors and adds both products
(vpmaddwd; vpdpwssd adds them to the sum as well). LLVM finds it in what is written here, on
processors that have it, and not in a loop of Python, whose sums run across a vector.
"""

from __future__ import annotations

from typing import Any

from ragspec.retrievers.indexes.node_heap_numba import load_numba

LANES = 16  # vectors whose sums are made side by side


def pair_sums(queries: int) -> Any:
    """Return what adds up a group of vectors with so many queries, as numba compiles it in place.

    It takes pairs i8 [G, W / 2, 16, 2], the group's number, queries i32 [W / 2, queries] of two
    16-bit numbers each, and where the sums go, i32 [queries, 16].
    """
    load_numba()
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    word, place = ir.IntType(32), ir.IntType(64)
    sums_type, wide = ir.VectorType(word, LANES), ir.VectorType(word, 2 * LANES)
    evens, odds = (ir.Constant(sums_type, [*range(half, 2 * LANES, 2)]) for half in range(2))
    first = ir.Constant(sums_type, [0] * LANES)  # also the sums at the start

    def every(build: Any, value: Any) -> Any:
        """Return 32 numbers: the two halves of a number, for all vectors."""
        empty = ir.Constant(sums_type, ir.Undefined)
        alone = build.insert_element(empty, value, ir.Constant(word, 0))
        spread = build.shuffle_vector(alone, empty, first)
        return build.sext(build.bitcast(spread, ir.VectorType(ir.IntType(16), 2 * LANES)), wide)

    def generate(context: Any, build: Any, signature: Any, given: Any) -> Any:
        arrays = [
            context.make_array(signature.args[at])(context, build, given[at]) for at in (0, 2, 3)
        ]
        pairs, told, sums = (array.data for array in arrays)
        count = build.extract_value(arrays[1].shape, 0)
        size = ir.Constant(place, 2 * LANES)
        group = build.gep(pairs, [build.mul(given[1], build.mul(count, size))])
        before, loop = build.basic_block, build.append_basic_block("pairs")
        after = build.append_basic_block("after")
        build.branch(loop)
        build.position_at_end(loop)
        at, states = build.phi(place), [build.phi(sums_type) for _ in range(queries)]
        at.add_incoming(ir.Constant(place, 0), before)
        spot = build.bitcast(
            build.gep(group, [build.mul(at, size)]),
            ir.VectorType(ir.IntType(8), 2 * LANES).as_pointer(),
        )
        read = build.load(spot)
        read.align = 1
        vectors, added = build.sext(read, wide), []
        for number, state in enumerate(states):
            state.add_incoming(first, before)
            lane = build.add(build.mul(at, ir.Constant(place, queries)), ir.Constant(place, number))
            made = build.mul(vectors, every(build, build.load(build.gep(told, [lane]))))
            halves = [
                build.shuffle_vector(made, ir.Constant(wide, ir.Undefined), half)
                for half in (evens, odds)
            ]
            added.append(build.add(state, build.add(*halves)))
            state.add_incoming(added[-1], loop)
        following = build.add(at, ir.Constant(place, 1))
        at.add_incoming(following, loop)
        build.cbranch(build.icmp_signed("<", following, count), loop, after)
        build.position_at_end(after)
        for number, total in enumerate(added):
            row = build.gep(sums, [ir.Constant(place, number * LANES)])
            build.store(total, build.bitcast(row, sums_type.as_pointer())).align = 1
        return context.get_dummy_value()

    @intrinsic
    def add_up(typing: Any, pairs: Any, group: Any, told: Any, sums: Any) -> Any:
        return types.void(pairs, group, told, sums), generate

    return add_up
