"""The instruction sets of this machine that the native core has loops for."""

from unicomm import _core

ISAS = [name for name in ("avx512", "avx2", "baseline") if _core.set_fold_isa(name)]
BEST = ISAS[0]  # in use, but in a test that chooses another one
_core.set_fold_isa(BEST)
