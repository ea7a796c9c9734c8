"""What training keeps in memory: the shapes of models, and what is alive at each moment, by kind.

No framework is imported here; `rulec.torch.account` takes the steps that are counted.
"""
