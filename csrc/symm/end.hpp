// One PE's end of a symmetric heap as Python holds it. Tensors on the heap hold it too, so that the memory
// lives as long as they do.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "core/bind.hpp"
#include "shm/bind_fault.hpp"
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

class End {
  public:
    using Blocks = std::map<Address, uint64_t>;

    // `blocks`: of the heap that a team shares.
    End(const symm::Vtbl& table, symm::Domain domain, std::shared_ptr<Blocks> blocks)
        : table_(table), domain_(domain), blocks_(std::move(blocks)) {}
    // Giving memory of a device back can wait for what runs there, which may need others who want Python.
    ~End() {
        std::optional<GilReleased> release;
        if (PyGILState_Check()) release.emplace();
        symm::Error error{};
        table_.leave(domain_, &error);
        table_.release(domain_, &error);
    }
    End(const End&) = delete;
    End& operator=(const End&) = delete;

    const symm::Vtbl& table() const { return table_; }
    symm::Domain domain() const { return domain_; }

    // One operation at a time: another thread of this PE does nothing for others while one waits.
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
    // What may come at any time.
    template <class F, class... A>
    nb::object call_now(F* function, const char* name, A... arguments) {
        symm::Error error{};
        int code = need(function, name)(domain_, arguments..., &error);
        return fault_tuple(symm::fault_of(code, error));
    }

    // Allocations, which the PEs have alike.
    const std::shared_ptr<Blocks>& blocks() const { return blocks_; }
    void allocated(Address address, uint64_t bytes) { (*blocks_)[address] = bytes; }
    void freed(Address address) { blocks_->erase(address); }
    bool begins(Address address) const { return blocks_->contains(address); }
    // Whether all of it lies in one of them.
    bool holds(Address address, uint64_t bytes) const {
        auto after = blocks_->upper_bound(address);
        if (after == blocks_->begin()) return false;
        auto [from, size] = *std::prev(after);
        return bytes <= size && address - from <= size - bytes;
    }

    // What composes operations of the table's; there once `open` has given it room in the heap.
    void open(int rank, int world, Address said) {
        composites_.emplace(table_, domain_, rank, world, at<void>(said));
    }
    symm::Composites* composites() { return composites_ ? &*composites_ : nullptr; }
    std::mutex& running() { return running_; }  // held while an operation runs

    // The PEs do something together that is none of them.
    void met() {
        if (composites_) composites_->met();
    }

  private:
    symm::Vtbl table_;
    symm::Domain domain_;
    std::shared_ptr<Blocks> blocks_;  // guarded by the GIL
    std::optional<symm::Composites> composites_;
    std::mutex running_;
};
using Ends = std::shared_ptr<End>;

void bind_composites(nb::class_<End>& end);
void bind_symm_fast(nb::module_& m);
void bind_nccl_windows(nb::module_& m);

}  // namespace unicomm
