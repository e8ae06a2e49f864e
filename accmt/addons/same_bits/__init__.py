r"""The same bits on any number of processes: `Trainer(same_bits=8)`.

Floating-point sums depend on their order, and so do random numbers on who draws them. Here neither depends on the
processes. A batch is computed in a fixed number of units, a power of two: fixed samples with a seed of their own, and
of one shape whoever computes them. Their gradients are added in a binary tree over the units. Each process has a part
of the tree, and the rest of it lies between processes:

    units      0   1   2   3   4   5   6   7
                \ /     \ /     \ /     \ /
    a process    +-------+       +-------+     of two
    all              +---------------+

The same idea, with gradients that are added in the order of virtual workers: EasyScale, https://arxiv.org/abs/2208.14228.
"""
