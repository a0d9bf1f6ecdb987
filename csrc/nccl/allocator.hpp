// A library's memory as torch's caching allocator wants it: two plain C functions for a pool, with nothing in
// their arguments that says of which library. So each library gets a pair of its own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "nccl/abi.hpp"

namespace unicomm::nccl {

// Signatures of torch.cuda.memory.CUDAPluggableAllocator. The memory is of the current device; the stream
// makes no difference. Null when there is none left.
using Allocate = void*(ptrdiff_t bytes, int device, Stream stream);
using Free = void(void* memory, ptrdiff_t bytes, int device, Stream stream);

struct Block {
    uintptr_t address = 0;  // 0: none
    size_t bytes = 0;
};

// Memory of one library that is in use. It lives for as long as the process.
class Allocator {
  public:
    // That of the library with these functions. Throws std::length_error when too many libraries have one.
    static Allocator of(int (*alloc)(void**, size_t), int (*free)(void*));

    std::pair<Allocate*, Free*> functions() const;
    // The allocation in which a byte lies.
    Block block_of(uintptr_t address) const;
    size_t bytes_in_use() const;

  private:
    explicit Allocator(size_t slot) : slot_(slot) {}
    size_t slot_;
};

}  // namespace unicomm::nccl
