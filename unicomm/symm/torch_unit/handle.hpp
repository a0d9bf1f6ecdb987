// One rank's end of an allocation in a group: the memory of the other ranks, signals, and waiting.
#pragma once
#include <ATen/ATen.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <vector>

namespace unicomm_torch {

namespace sm = c10d::symmetric_memory;
namespace py = pybind11;
using Clock = std::chrono::steady_clock;
using Word = std::atomic_ref<uint32_t>;

constexpr size_t kPage = 4096, kSlots = 16, kSlotBytes = 8192, kCounters = 64;
constexpr int kMostRanks = int((kSlotBytes - kCounters) / sizeof(uint32_t));

inline size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

class Mapping {
  public:
    Mapping(int fd, size_t bytes) : bytes_(bytes) {
        void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        TORCH_CHECK(at != MAP_FAILED, "cannot map ", bytes, " bytes of symmetric memory: ", strerror(errno));
        at_ = static_cast<char*>(at);
    }
    ~Mapping() { munmap(at_, bytes_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    char* at() const { return at_; }

  private:
    char* at_ = nullptr;
    size_t bytes_;
};

struct Descriptor {
    int number = -1;
    ~Descriptor() {
        if (number >= 0) close(number);
    }
};

inline void wake(void* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

// Waits until ready(value of the word). A change without a wake is noticed within 50 ms. After each 50 ms
// check(milliseconds so far) may raise, and so does Ctrl-C.
template <class T, class F, class C>
void await_word(T* word, F ready, C check) {
    auto began = Clock::now();
    for (int i = 0; i < 200; ++i) {
        if (ready(std::atomic_ref<T>(*word).load())) return;
    }
    while (true) {
        auto* low = reinterpret_cast<uint32_t*>(word);
        uint32_t seen = Word(*low).load();
        if (ready(std::atomic_ref<T>(*word).load())) return;
        timespec slice{0, 50'000'000};
        if (syscall(SYS_futex, low, FUTEX_WAIT, seen, &slice, nullptr, 0) == 0 || errno != ETIMEDOUT)
            continue;
        if (ready(std::atomic_ref<T>(*word).load())) return;
        auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began);
        check(size_t(passed.count()));
        py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

// One rank's end of an allocation in a group.
class Handle : public sm::SymmetricMemory {
  public:
    struct Peer {
        std::shared_ptr<Mapping> memory;
        std::shared_ptr<Descriptor> process;  // readable once it has ended
        char* slot;
    };

    Handle(std::vector<Peer> peers, int rank, size_t bytes, size_t pad_bytes, std::vector<int> globals)
        : peers_(std::move(peers)),
          rank_(rank),
          bytes_(bytes),
          pad_bytes_(pad_bytes),
          globals_(std::move(globals)) {
        for (auto& peer : peers_) {
            buffers_.push_back(peer.memory->at());
            pads_.push_back(peer.memory->at() + whole_pages(bytes_));
        }
    }

    std::vector<void*> get_buffer_ptrs() override { return buffers_; }
    std::vector<void*> get_signal_pad_ptrs() override { return pads_; }
    void** get_buffer_ptrs_dev() override { return buffers_.data(); }
    void** get_signal_pad_ptrs_dev() override { return pads_.data(); }
    size_t get_buffer_size() override { return bytes_; }
    size_t get_offset() override { return 0; }
    bool has_multicast_support() override { return false; }
    void* get_multicast_ptr() override { return nullptr; }
    int get_rank() override { return rank_; }
    int get_world_size() override { return int(peers_.size()); }
    c10::Device get_device() override { return c10::Device(c10::kCPU); }
    const std::vector<int>& get_rank_to_global_rank() override { return globals_; }
    int* get_rank_to_global_rank_dev() override { return globals_.data(); }
    bool world_within_direct_access() override { return true; }

    // One flag per pair and channel: a second signal waits until the first one was taken.
    void put_signal(int dst, int channel, size_t timeout_ms) override {
        swap(pad_word(dst, channel, rank_), 0, 1, dst, timeout_ms, "take this rank's last signal");
    }
    void wait_signal(int src, int channel, size_t timeout_ms) override {
        swap(pad_word(rank_, channel, src), 1, 0, src, timeout_ms, "signal");
    }
    void barrier(int channel, size_t timeout_ms) override {
        for (int p = 0; p < get_world_size(); ++p) {
            if (p != rank_) put_signal(p, channel, timeout_ms);
        }
        for (int p = 0; p < get_world_size(); ++p) {
            if (p != rank_) wait_signal(p, channel, timeout_ms);
        }
    }

    // A barrier for operations, which does not use the program's signal pad.
    void meet() {
        uint32_t round = ++round_;
        uint32_t* mine = slot_word(rank_, 0);
        Word(*mine).store(round);
        wake(mine);
        for (int p = 0; p < get_world_size(); ++p) {
            uint32_t* theirs = slot_word(p, 0);
            await(theirs, [&](uint32_t v) { return int32_t(v - round) >= 0; }, p, 0, "come to the operation");
        }
    }

    // Meets after `part`, which may raise on some of the ranks. Then all ranks raise, so that none of them
    // goes on alone to the next meeting, and waits for the others there.
    template <class F>
    void meet_after(F part) {
        std::exception_ptr error;
        try {
            part();
        } catch (...) {
            error = std::current_exception();
        }
        // A rank may be on its way to the next meeting while others read its word: two words take turns.
        size_t word = 8 + (round_ + 1) % 2;
        *slot_word(rank_, word) = bool(error);
        meet();
        if (error) std::rethrow_exception(error);
        for (int p = 0; p < get_world_size(); ++p) {
            TORCH_CHECK(!*slot_word(p, word), "rank ", p,
                        " could not do its part of the operation: its own error says why");
        }
    }

    // Counting signals, for put_signal(src, hdl, peer).
    void count_signal(int dst) {
        uint32_t* word = slot_word(dst, kCounters / 4 + size_t(rank_));
        Word(*word).fetch_add(1);
        wake(word);
    }
    void await_count(int src) {
        check_rank(src);
        taken_.resize(peers_.size());
        uint32_t wanted = taken_[size_t(src)] + 1;
        await(
            slot_word(rank_, kCounters / 4 + size_t(src)),
            [&](uint32_t v) { return int32_t(v - wanted) >= 0; }, src, 0, "signal");
        taken_[size_t(src)] = wanted;
    }

    void check_rank(int64_t rank) const {
        TORCH_CHECK(rank >= 0 && rank < int64_t(peers_.size()), "rank ", rank, " of a group of ",
                    peers_.size());
    }

    // Waits until ready(value of the word). `peer` is the rank that should change it; its death ends the
    // wait. timeout_ms 0: no timeout.
    template <class T, class F>
    void await_word(T* word, F ready, int peer, size_t timeout_ms, const char* what) {
        unicomm_torch::await_word(word, ready, [&](size_t passed_ms) {
            TORCH_CHECK_WITH(DistBackendError, !has_ended(peer), "rank ", rank_, " waited for rank ", peer,
                             " to ", what, ", but its process has ended");
            TORCH_CHECK_WITH(DistBackendError, timeout_ms == 0 || passed_ms < timeout_ms, "rank ", peer,
                             " did not ", what, " within ", timeout_ms, " ms, as rank ", rank_, " saw it");
        });
    }

    // For a wait that any other rank may end: raises if all of them have ended.
    void check_anybody_left() const {
        int others = 0, ended = 0;
        for (int p = 0; p < int(peers_.size()); ++p) {
            if (p != rank_) ++others, ended += has_ended(p);
        }
        TORCH_CHECK_WITH(DistBackendError, others == 0 || ended < others, "rank ", rank_,
                         " waits for a signal, but the processes of all ", others, " other ranks have ended");
    }

    // What a rank tells the others about its operation: written before a meeting, read between that and the
    // next.
    int64_t* told_by(int rank) { return reinterpret_cast<int64_t*>(slot_word(rank, 4)); }

    // The 64-bit value of this allocation that put_with_signal sets if the operation names no word.
    uint64_t* value_of(int rank) { return reinterpret_cast<uint64_t*>(slot_word(rank, 2)); }

  private:
    bool has_ended(int rank) const {
        pollfd ended{peers_[size_t(rank)].process->number, POLLIN, 0};
        return ended.fd >= 0 && poll(&ended, 1, 0) != 0;
    }

    template <class F>
    void await(uint32_t* word, F ready, int peer, size_t timeout_ms, const char* what) {
        await_word<uint32_t>(word, ready, peer, timeout_ms, what);
    }

    uint32_t* slot_word(int rank, size_t word) {
        return reinterpret_cast<uint32_t*>(peers_[size_t(rank)].slot) + word;
    }

    uint32_t* pad_word(int of, int channel, int from) {
        check_rank(of);
        check_rank(from);
        size_t word = size_t(channel) * peers_.size() + size_t(from);
        TORCH_CHECK(channel >= 0 && (size_t(channel) + 1) * peers_.size() * 4 <= pad_bytes_, "channel ",
                    channel, " does not fit in a signal pad of ", pad_bytes_, " bytes for ", peers_.size(),
                    " ranks");
        return static_cast<uint32_t*>(pads_[size_t(of)]) + word;
    }

    void swap(uint32_t* word, uint32_t from, uint32_t to, int peer, size_t timeout_ms, const char* what) {
        await(
            word,
            [&](uint32_t) {
                uint32_t expected = from;
                return Word(*word).compare_exchange_strong(expected, to);
            },
            peer, timeout_ms, what);
        wake(word);
    }

    std::vector<Peer> peers_;
    int rank_;
    size_t bytes_, pad_bytes_;
    std::vector<int> globals_;
    std::vector<void*> buffers_, pads_;
    uint32_t round_ = 0;
    std::vector<uint32_t> taken_;
};
using Handles = c10::intrusive_ptr<Handle>;

}  // namespace unicomm_torch
