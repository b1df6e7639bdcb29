"""How per-example gradients are computed: one example after the other by vmap, or all at once by layers' rules.

`vmap.Vmap` is the reference. `hooks.Hooks` is faster: one forward and one backward pass for all examples, from which
the rules of `layers` make factors. It compares some examples with autograd as it goes (`self_check`), and refuses
where they differ.
"""
