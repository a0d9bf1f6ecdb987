// A table of libraries, each with its own pair of C functions.
#include "nccl/allocator.hpp"

#include <array>
#include <map>
#include <mutex>
#include <stdexcept>

namespace unicomm::nccl {
namespace {

constexpr size_t kLibraries = 8;  // NCCL, RCCL, and what tests open

struct Slot {
    int (*alloc)(void**, size_t) = nullptr;
    int (*free)(void*) = nullptr;
    std::map<uintptr_t, size_t> blocks;
    size_t bytes = 0;
};

// Never destroyed: torch frees memory while the process ends.
struct State {
    std::mutex mutex;
    std::array<Slot, kLibraries> slots;
    size_t used = 0;
};
State& state() {
    static State* s = new State;
    return *s;
}

template <size_t I>
void* allocate(ptrdiff_t bytes, int, Stream) {
    void* memory = nullptr;
    Slot& slot = state().slots[I];
    if (bytes <= 0 || slot.alloc(&memory, static_cast<size_t>(bytes)) != kSuccess) return nullptr;
    std::lock_guard lock(state().mutex);
    slot.blocks[reinterpret_cast<uintptr_t>(memory)] = static_cast<size_t>(bytes);
    slot.bytes += static_cast<size_t>(bytes);
    return memory;
}

template <size_t I>
void release(void* memory, ptrdiff_t, int, Stream) {
    Slot& slot = state().slots[I];
    {
        std::lock_guard lock(state().mutex);
        auto found = slot.blocks.find(reinterpret_cast<uintptr_t>(memory));
        if (found != slot.blocks.end()) {
            slot.bytes -= found->second;
            slot.blocks.erase(found);
        }
    }
    slot.free(memory);  // no caller could receive its result
}

template <size_t... I>
constexpr std::array<std::pair<Allocate*, Free*>, sizeof...(I)> pairs(std::index_sequence<I...>) {
    return {std::pair<Allocate*, Free*>{allocate<I>, release<I>}...};
}
constexpr auto kPairs = pairs(std::make_index_sequence<kLibraries>());

}  // namespace

Allocator Allocator::of(int (*alloc)(void**, size_t), int (*free)(void*)) {
    State& s = state();
    std::lock_guard lock(s.mutex);
    for (size_t i = 0; i < s.used; ++i) {
        if (s.slots[i].alloc == alloc) return Allocator(i);
    }
    if (s.used == kLibraries) throw std::length_error("too many libraries give memory to this process");
    s.slots[s.used].alloc = alloc;
    s.slots[s.used].free = free;
    return Allocator(s.used++);
}

std::pair<Allocate*, Free*> Allocator::functions() const { return kPairs[slot_]; }

Block Allocator::block_of(uintptr_t address) const {
    State& s = state();
    std::lock_guard lock(s.mutex);
    const auto& blocks = s.slots[slot_].blocks;
    auto after = blocks.upper_bound(address);
    if (after == blocks.begin()) return {};
    auto [begin, bytes] = *std::prev(after);
    return address - begin < bytes ? Block{begin, bytes} : Block{};
}

size_t Allocator::bytes_in_use() const {
    State& s = state();
    std::lock_guard lock(s.mutex);
    return s.slots[slot_].bytes;
}

}  // namespace unicomm::nccl
