// Reductions of memory of several PEs, also of matrices with steps.
#pragma once
#include <cstdint>
#include <vector>

#include "symm/composites.hpp"

namespace unicomm::symm {

// Folds `count` elements of each source, from byte `at` on, into `out`.
bool fold_all(DType dtype, Red red, char* out, const std::vector<const char*>& sources, int64_t at,
              int64_t count);

// Returns the number of elements from the first to the last one of a tile.
uint64_t span_of(const Tile& tile);

// Folds the tiles of the sources into `out`; `in` describes where a tile lies in the memory of its source.
bool fold_tiles(DType dtype, Red red, Tile out, Tile in, const std::vector<const char*>& sources);

}  // namespace unicomm::symm
