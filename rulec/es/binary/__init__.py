"""Binary weights: bits drawn from probabilities, packed, and multiplied by exclusive or and counting.

`product` and `convolve` stand on their own: they multiply packed bits for all members of a batch at once.
"""

from rulec.backend.capabilities import Bits, words_of
from rulec.es.binary.kernels import pack, unpack
from rulec.es.binary.product import convolve, max_pool, product
from rulec.es.binary.weights import SHARPNESS, draw, likely, member_weights, score_gradient

__all__ = [
    "SHARPNESS", "Bits", "convolve", "draw", "likely", "max_pool", "member_weights", "pack", "product",
    "score_gradient", "unpack", "words_of",
]  # fmt: skip
