// The processes of one job: a shared piece of memory with a heap for each, barriers, and the teams' numbers.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace mock_nvshmem {

constexpr int kMaxPes = 64, kMaxTeams = 32;

// A place where so many PEs meet.
struct Meeting {
    std::atomic<uint32_t> arrived, round;
    void meet(int members);
};

struct Shared {
    std::atomic<int32_t> attached;
    int32_t npes;
    uint64_t heap;                                  // bytes, of each PE
    std::atomic<uint32_t> team_members[kMaxTeams];  // who has not destroyed it; 0: the number is free
    Meeting meetings[kMaxTeams];
    std::atomic<int32_t> offered;  // a team's number, while it is split off
};

struct Team {
    int start, stride, size, me;
    int at(int i) const { return start + i * stride; }
};

// This process in a job.
class World {
  public:
    // Waits for all `npes`. Throws std::runtime_error.
    World(const std::string& name, int me, int npes, uint64_t heap);
    ~World();

    int me() const { return me_; }
    int npes() const { return shared_->npes; }
    char* heap(int pe) const { return heaps_ + uint64_t(pe) * shared_->heap; }
    bool holds(const void* address, size_t bytes) const;
    // `pe`'s copy of what is at a symmetric address of this PE's.
    template <class T>
    T* there(T* address, int pe) const {
        auto at = reinterpret_cast<const char*>(address) - heap(me_);
        return reinterpret_cast<T*>(heap(pe) + at);
    }

    void* take(size_t align, size_t bytes);  // null: no room
    bool give(void* address);

    const Team* team(int number) const;
    void meet(int number);
    int split(const Team& parent, int parent_number, int start, int stride,
              int size);  // -1: not in it, -2: full
    void destroy(int number);

  private:
    Shared* shared_ = nullptr;
    char* heaps_ = nullptr;
    size_t mapped_ = 0;
    int me_;
    std::map<int, Team> teams_;
    std::map<uint64_t, uint64_t> used_;  // offset -> bytes
};

}  // namespace mock_nvshmem
