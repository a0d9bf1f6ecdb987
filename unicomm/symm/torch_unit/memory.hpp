// Symmetric memory of torch on CPU tensors. Each allocation is a memfd, so that other processes can map it.
// Allocating is local, as in torch; at a rendezvous the ranks of a group exchange where their memory is.
//
//   data | signal pad of the program | slots of this unit
//
// A group uses one slot of the allocation of each rank, whose numbers the ranks exchange.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>

#include <map>
#include <mutex>

#include "handle.hpp"

namespace unicomm_torch {

// What this unit asks of Python.
struct Hooks {
    py::object exchange;   // (group, bytes) -> rank, bytes of all ranks, their ranks in the job
    py::object number_of;  // (group) -> number of the group that now has this name; 0 if none has it
};

inline Hooks& hooks() {
    static auto* all = new Hooks();  // outlives the interpreter
    return *all;
}

inline int64_t number_of(const std::string& group) {
    py::gil_scoped_acquire gil;
    return hooks().number_of(group).cast<int64_t>();
}

// A rendezvous that was held: with which group, as a later group may have the same name.
struct Meeting {
    int64_t number;
    Handles handle;
};

// What a rank publishes about its allocation.
struct Offer {
    int64_t pid, fd, slot;
    uint64_t bytes, pad_bytes, inode;
};

struct Allocation {
    Descriptor fd;
    std::shared_ptr<Mapping> memory;
    size_t bytes = 0, pad_bytes = 0;
    uint64_t inode = 0;
    std::optional<std::string> group;
    std::map<std::string, Meeting> met;  // by the name of the group
    size_t slots = 0;

    char* slot(size_t number) const {
        return memory->at() + whole_pages(bytes) + whole_pages(pad_bytes) + number * kSlotBytes;
    }
};

inline size_t total_bytes(size_t bytes, size_t pad_bytes) {
    return whole_pages(bytes) + whole_pages(pad_bytes) + kSlots * kSlotBytes;
}

// All allocations of the process. Several backend names of torch share it.
class Memory {
  public:
    static Memory& one() {
        static auto* memory = new Memory();  // tensors may be freed after the interpreter's end
        return *memory;
    }

    void* alloc(size_t bytes, const std::optional<std::string>& group) {
        auto made = std::make_shared<Allocation>();
        made->bytes = bytes;
        made->pad_bytes = sm::get_signal_pad_size();
        made->group = group;
        made->fd.number = memfd_create("unicomm-torch-symmetric", MFD_CLOEXEC);
        size_t total = total_bytes(bytes, made->pad_bytes);
        TORCH_CHECK(made->fd.number >= 0 && ftruncate(made->fd.number, off_t(total)) == 0, "cannot make ",
                    bytes, " bytes of symmetric memory: ", strerror(errno));
        struct stat info{};
        fstat(made->fd.number, &info);
        made->inode = info.st_ino;
        made->memory = std::make_shared<Mapping>(made->fd.number, total);
        std::lock_guard lock(mutex_);
        allocations_[made->memory->at()] = made;
        return made->memory->at();
    }

    void free(void* ptr) {
        std::shared_ptr<Allocation> gone;  // released without the lock
        std::lock_guard lock(mutex_);
        auto found = allocations_.find(ptr);
        if (found == allocations_.end()) return;
        gone = found->second;
        allocations_.erase(found);
    }

    std::shared_ptr<Allocation> find(void* ptr) {
        std::lock_guard lock(mutex_);
        auto found = allocations_.find(ptr);
        return found == allocations_.end() ? nullptr : found->second;
    }

    // Returns the handle of an allocation, or null for other memory, like the backends of torch.
    Handles rendezvous(void* ptr, const std::optional<std::string>& group) {
        auto own = find(ptr);
        if (!own) return {};
        TORCH_CHECK(group || own->group, "rendezvous needs a group: pass one, or allocate with one");
        const std::string& name = group ? *group : *own->group;
        int64_t number = number_of(name);
        {
            std::lock_guard lock(mutex_);
            auto known = own->met.find(name);
            if (known != own->met.end() && known->second.number == number) return known->second.handle;
        }
        Meeting made{number, connect(*own, name)};
        std::lock_guard lock(mutex_);
        std::swap(own->met[name], made);  // an older one is released without the lock
        return own->met[name].handle;
    }

    // For operations that name no group: the group of the job, or the only one.
    Handles any(const at::Tensor& tensor) {
        auto own = find(tensor.storage().mutable_data());
        TORCH_CHECK(own, "the tensor is not from symm_mem.empty(), or another storage than it had");
        std::map<std::string, Meeting> met;
        {
            std::lock_guard lock(mutex_);
            met = own->met;
        }
        std::erase_if(met, [](auto& known) { return known.second.number != number_of(known.first); });
        auto job = met.find("0");
        if (job != met.end()) return job->second.handle;
        TORCH_CHECK(met.size() == 1, "the tensor has met in ", met.size(),
                    " groups: call symm_mem.rendezvous(tensor, group) once, first");
        return met.begin()->second.handle;
    }

  private:
    static std::vector<std::string> exchange(const std::string& group, const std::string& said, int& rank,
                                             std::vector<int>& globals) {
        py::gil_scoped_acquire gil;
        py::tuple answer = hooks().exchange(group, py::bytes(said));
        rank = answer[0].cast<int>();
        globals = answer[2].cast<std::vector<int>>();
        return answer[1].cast<std::vector<std::string>>();
    }

    Handles connect(Allocation& own, const std::string& group) {
        size_t slot = own.slots++;
        Offer mine{getpid(), own.fd.number, int64_t(slot), own.bytes, own.pad_bytes, own.inode};
        int rank = 0;
        std::vector<int> globals;
        auto said = exchange(group, {reinterpret_cast<char*>(&mine), sizeof mine}, rank, globals);
        std::vector<Handle::Peer> peers;
        std::string trouble;
        for (size_t p = 0; p < said.size() && trouble.empty(); ++p) {
            Offer offer;
            std::memcpy(&offer, said[p].data(), std::min(sizeof offer, said[p].size()));
            if (said[p].size() != sizeof offer) {
                trouble = "rank " + std::to_string(p) + " has another version of unicomm or torch";
            } else if (offer.bytes != mine.bytes || offer.pad_bytes != mine.pad_bytes) {
                trouble = "rank " + std::to_string(p) + " has " + std::to_string(offer.bytes) +
                          " bytes with a pad of " + std::to_string(offer.pad_bytes) + ", rank " +
                          std::to_string(rank) + " has " + std::to_string(mine.bytes) + " with one of " +
                          std::to_string(mine.pad_bytes);
            } else if (offer.slot >= int64_t(kSlots) || said.size() > size_t(kMostRanks)) {
                trouble = "more than 16 groups of one tensor, or 2032 ranks";
            } else {
                try {
                    peers.push_back(int(p) == rank ? self(own, slot) : open_peer(offer, int(p)));
                } catch (const std::exception& error) {
                    trouble = error.what();
                }
            }
        }
        // No rank closes what another has yet to open, and all learn of an error.
        auto told = exchange(group, trouble, rank, globals);
        for (size_t p = 0; p < told.size(); ++p) {
            TORCH_CHECK(told[p].empty(), "symmetric memory cannot meet in group '", group, "', says rank ", p,
                        ": ", told[p]);
        }
        return c10::make_intrusive<Handle>(std::move(peers), rank, own.bytes, own.pad_bytes,
                                           std::move(globals));
    }

    static Handle::Peer self(Allocation& own, size_t slot) {
        return {own.memory, std::make_shared<Descriptor>(), own.slot(slot)};
    }

    static Handle::Peer open_peer(const Offer& offer, int rank) {
        Descriptor fd;
        std::string path = "/proc/" + std::to_string(offer.pid) + "/fd/" + std::to_string(offer.fd);
        fd.number = open(path.c_str(), O_RDWR | O_CLOEXEC);
        struct stat info{};
        TORCH_CHECK(fd.number >= 0 && fstat(fd.number, &info) == 0 && info.st_ino == offer.inode,
                    "cannot open the memory of rank ", rank,
                    ": all ranks have to be on one host, of one user");
        auto process = std::make_shared<Descriptor>();
        process->number = int(syscall(SYS_pidfd_open, pid_t(offer.pid), 0));
        auto memory = std::make_shared<Mapping>(fd.number, total_bytes(offer.bytes, offer.pad_bytes));
        char* slots = memory->at() + whole_pages(offer.bytes) + whole_pages(offer.pad_bytes);
        return {memory, process, slots + size_t(offer.slot) * kSlotBytes};
    }

    std::mutex mutex_;
    std::map<void*, std::shared_ptr<Allocation>> allocations_;
};

class Allocator : public sm::SymmetricMemoryAllocator {
  public:
    explicit Allocator(std::string name) : name_(std::move(name)) {}
    void* alloc(size_t size, int, const std::optional<std::string>& group) override {
        return Memory::one().alloc(size, group);
    }
    void free(void* ptr) override { Memory::one().free(ptr); }
    size_t get_alloc_size(void* ptr) override {
        auto own = Memory::one().find(ptr);
        TORCH_CHECK(own, "no symmetric memory begins there");
        return own->bytes;
    }
    c10::intrusive_ptr<sm::SymmetricMemory> rendezvous(void* ptr,
                                                       const std::optional<std::string>& group) override {
        return Memory::one().rendezvous(ptr, group);
    }
    bool has_multicast_support(int) override { return false; }
    c10::DeviceType supported_device_type() override { return c10::DeviceType::CPU; }
    std::string name() override { return name_; }
    bool has_allocation(void* ptr) {  // no `override`: torch 2.11 does not declare it
        return Memory::one().find(ptr) != nullptr;
    }

  private:
    std::string name_;
};

}  // namespace unicomm_torch
