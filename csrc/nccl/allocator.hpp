// A library's memory for torch's caching allocator, which takes two plain C functions per pool. Their
// arguments do not tell which library is meant, so each library gets its own pair.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "nccl/abi.hpp"

namespace unicomm::nccl {

// Signatures of torch.cuda.memory.CUDAPluggableAllocator. The memory is on the current device, and the stream
// has no effect. Returns null if there is no memory left.
using Allocate = void*(ptrdiff_t bytes, int device, Stream stream);
using Free = void(void* memory, ptrdiff_t bytes, int device, Stream stream);

struct Block {
    uintptr_t address = 0;  // 0: none
    size_t bytes = 0;
};

// The memory in use of one library. It lives as long as the process.
class Allocator {
  public:
    // Returns the allocator of the library with these functions. Throws std::length_error if there are too
    // many libraries.
    static Allocator of(int (*alloc)(void**, size_t), int (*free)(void*));

    std::pair<Allocate*, Free*> functions() const;
    // Returns the allocation in which a byte lies.
    Block block_of(uintptr_t address) const;
    size_t bytes_in_use() const;

  private:
    explicit Allocator(size_t slot) : slot_(slot) {}
    size_t slot_;
};

}  // namespace unicomm::nccl
