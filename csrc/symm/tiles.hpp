// Reductions of several PEs' memory, also of matrices in steps.
#pragma once
#include <cstdint>
#include <vector>

#include "symm/composites.hpp"

namespace unicomm::symm {

// out = the fold of `count` elements that each source has from byte `at` on.
bool fold_all(DType dtype, Red red, char* out, const std::vector<const char*>& sources, int64_t at,
              int64_t count);

// Elements from a tile's first to its last one, both counted.
uint64_t span_of(const Tile& tile);

// out = the fold of the sources' tiles, each of which lies in its memory as `in` says.
bool fold_tiles(DType dtype, Red red, Tile out, Tile in, const std::vector<const char*>& sources);

}  // namespace unicomm::symm
