#include "world.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace mock_nvshmem {
namespace {

constexpr uint64_t kPage = 4096;

void nap() {
    timespec t{0, 20000};
    nanosleep(&t, nullptr);
}

}  // namespace

void Meeting::meet(int members) {
    uint32_t round_now = round.load();
    if (arrived.fetch_add(1) + 1 == uint32_t(members)) {
        arrived.store(0);
        round.fetch_add(1);
        return;
    }
    for (int looks = 0; round.load() == round_now; ++looks) looks < 200 ? void(sched_yield()) : nap();
}

World::World(const std::string& name, int me, int npes, uint64_t heap) : me_(me) {
    heap = (heap + kPage - 1) / kPage * kPage;
    size_t head = (sizeof(Shared) + kPage - 1) / kPage * kPage;
    mapped_ = head + heap * size_t(npes);
    // The first makes it with its size; pages are there once they are touched.
    int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, off_t(mapped_)) != 0) throw std::runtime_error("no shared memory");
    void* at = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) throw std::runtime_error("cannot map the heap");
    shared_ = static_cast<Shared*>(at);
    heaps_ = static_cast<char*>(at) + head;
    shared_->npes = npes;
    shared_->heap = heap;
    teams_[0] = Team{0, 1, npes, me};
    shared_->team_members[0] = uint32_t(npes);
    shared_->attached.fetch_add(1);
    while (shared_->attached.load() < npes) nap();
    shm_unlink(name.c_str());
}

World::~World() { munmap(shared_, mapped_); }

bool World::holds(const void* address, size_t bytes) const {
    auto at = static_cast<const char*>(address);
    const char* begin = heap(me_);
    return at >= begin && uint64_t(at - begin) <= shared_->heap &&
           bytes <= shared_->heap - uint64_t(at - begin);
}

void* World::take(size_t align, size_t bytes) {
    uint64_t at = 0;
    for (auto [offset, length] : used_) {
        at = (at + align - 1) / align * align;
        if (at + bytes <= offset) break;
        at = offset + length;
    }
    at = (at + align - 1) / align * align;
    if (at + bytes > shared_->heap) return nullptr;
    used_[at] = bytes;
    std::memset(heap(me_) + at, 0xA5, bytes);  // nobody is promised zeros
    return heap(me_) + at;
}

bool World::give(void* address) {
    return used_.erase(uint64_t(static_cast<char*>(address) - heap(me_))) == 1;
}

const Team* World::team(int number) const {
    auto found = teams_.find(number);
    return found == teams_.end() ? nullptr : &found->second;
}

void World::meet(int number) { shared_->meetings[number].meet(teams_.at(number).size); }

int World::split(const Team& parent, int parent_number, int start, int stride, int size) {
    if (parent.me == 0) {
        int free = 1;
        while (free < kMaxTeams && shared_->team_members[free].load() != 0) ++free;
        if (free < kMaxTeams) shared_->team_members[free] = uint32_t(size);
        shared_->offered = free < kMaxTeams ? free : -2;
    }
    meet(parent_number);
    int number = shared_->offered;
    meet(parent_number);
    if (number < 0) return -2;
    for (int i = 0; i < size; ++i) {
        if (start + i * stride == parent.me) {
            teams_[number] = Team{parent.at(start), parent.stride * stride, size, i};
            return number;
        }
    }
    return -1;
}

void World::destroy(int number) {
    if (teams_.erase(number) == 1) shared_->team_members[number].fetch_sub(1);
}

}  // namespace mock_nvshmem
