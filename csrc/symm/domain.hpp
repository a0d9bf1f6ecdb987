// A domain (one PE's end of a symmetric heap) for Python. Tensors on the heap hold it, so that the memory
// lives as long as they do.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/bind.hpp"
#include "base/bind_fault.hpp"
#include "symm/composites.hpp"
#include "symm/table.hpp"

namespace unicomm {

using Address = uintptr_t;

template <class F>
F* need(F* function, const char* name) {
    if (function == nullptr) throw nb::attribute_error((std::string("the library has no ") + name).c_str());
    return function;
}

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

class SymmDomain {
  public:
    using Blocks = std::map<Address, uint64_t>;

    // `blocks`: the allocations of the heap, which teams share.
    SymmDomain(const symm::Vtbl& table, symm::Domain domain, std::shared_ptr<Blocks> blocks)
        : table_(table), domain_(domain), blocks_(std::move(blocks)) {}
    // Freeing device memory may wait for kernels, which may wait for ranks that need the GIL.
    ~SymmDomain() {
        std::optional<GilReleased> release;
        if (Py_IsInitialized()) release.emplace();
        symm::Error error{};
        table_.leave(domain_, &error);
        table_.release(domain_, &error);
    }
    SymmDomain(const SymmDomain&) = delete;
    SymmDomain& operator=(const SymmDomain&) = delete;

    const symm::Vtbl& table() const { return table_; }
    symm::Domain domain() const { return domain_; }

    // Runs one operation at a time: while one waits, other threads of this PE run none.
    template <class F, class... A>
    nb::object call(F* function, const char* name, A... arguments) {
        need(function, name);
        symm::Error error{};
        int code;
        {
            GilReleased release;
            std::lock_guard lock(running_);
            code = function(domain_, arguments..., &error);
        }
        return fault_tuple(symm::fault_of(code, error));
    }
    // For functions that may be called at any time.
    template <class F, class... A>
    nb::object call_now(F* function, const char* name, A... arguments) {
        symm::Error error{};
        int code = need(function, name)(domain_, arguments..., &error);
        return fault_tuple(symm::fault_of(code, error));
    }

    // The allocations, which are alike on all PEs.
    const std::shared_ptr<Blocks>& blocks() const { return blocks_; }
    void allocated(Address address, uint64_t bytes) { (*blocks_)[address] = bytes; }
    void freed(Address address) { blocks_->erase(address); }
    bool begins(Address address) const { return blocks_->contains(address); }
    // Whether all of it lies in one allocation.
    bool holds(Address address, uint64_t bytes) const {
        auto after = blocks_->upper_bound(address);
        if (after == blocks_->begin()) return false;
        auto [from, size] = *std::prev(after);
        return bytes <= size && address - from <= size - bytes;
    }

    // Creates the composites, in memory of the heap.
    void open(int rank, int world, Address said) {
        composites_.emplace(table_, domain_, rank, world, at<void>(said));
    }
    symm::Composites* composites() { return composites_ ? &*composites_ : nullptr; }
    std::mutex& running() { return running_; }  // held while an operation runs

    // Counts something that the PEs do together without the composites.
    void count_meeting() {
        if (composites_) composites_->count_meeting();
    }

  private:
    symm::Vtbl table_;
    symm::Domain domain_;
    std::shared_ptr<Blocks> blocks_;  // guarded by the GIL
    std::optional<symm::Composites> composites_;
    std::mutex running_;
};
using SymmDomainPtr = std::shared_ptr<SymmDomain>;

void bind_composites(nb::class_<SymmDomain>& end);
void bind_symm_fast(nb::module_& m);
void bind_nccl_windows(nb::module_& m);

}  // namespace unicomm
