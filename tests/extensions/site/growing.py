"""A window maker: optimizer steps of more and more samples, as the gradients of a run get noisier."""


def growing(window, state) -> bool:
    """Return whether a step has its samples: four at first, twice as many after every third step."""
    return window.num_samples >= 4 * 2 ** (state.global_step // 3)
