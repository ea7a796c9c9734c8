"""The memory of training: the shapes of models, and the bytes alive at each moment, by kind.

No framework is imported here; `rulec.torch.memory_profile` takes the steps that are counted.
"""
