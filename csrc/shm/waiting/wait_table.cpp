// The wait tables of this process and of its peers.
#include "shm/waiting/wait_table.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <map>

#include "base/error.hpp"
#include "shm/memory/shared_file.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kWaitTableMagic = 0x324452424d4f4355ull;  // "UCOMBRD2"

struct Known {
    std::mutex mutex;
    std::weak_ptr<WaitTable> own[simulation::kProcesses];
    std::map<uint64_t, std::weak_ptr<const WaitTable>> others;
};
Known* known_tables = new Known();

// A forked child has no tables, and another thread may have held the mutex at the fork.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { known_tables = new Known(); });

}  // namespace

uint64_t random_id() {
    if constexpr (simulation::kOn) return simulation::random_id();
    uint64_t id = 0;
    while (id == 0) {
        if (getrandom(&id, sizeof id, 0) != sizeof id) id = 0;
    }
    return id;
}

std::shared_ptr<WaitTable> WaitTable::mine() {
    std::lock_guard lock(known_tables->mutex);
    std::weak_ptr<WaitTable>& own = known_tables->own[simulation::process()];
    std::shared_ptr<WaitTable> table = own.lock();
    if (table) return table;
    table.reset(new WaitTable());
    try {
        table->fd_ = make_shared_file("unicomm-waits", "wait table", sizeof(WaitTablePage));
    } catch (const SystemFailure&) {
        return nullptr;
    }
    table->ref_ = {random_id(), getpid(), table->fd_};
    void* mem = mmap(nullptr, sizeof(WaitTablePage), PROT_READ | PROT_WRITE, MAP_SHARED, table->fd_, 0);
    if (mem == MAP_FAILED) return nullptr;
    table->page_ = static_cast<WaitTablePage*>(mem);
    table->page_->magic = kWaitTableMagic;
    table->page_->id = table->ref_.id;
    table->page_->pid = table->ref_.pid;
    own = table;
    return table;
}

std::shared_ptr<const WaitTable> WaitTable::open(const WaitTableRef& ref) {
    std::lock_guard lock(known_tables->mutex);
    if (ref.id == 0) return nullptr;
    for (int process = 0; process < simulation::kProcesses; ++process) {
        auto table = known_tables->own[process].lock();
        if (table && table->ref_.id == ref.id && !simulation::ended(process)) return table;
    }
    auto& others = known_tables->others;
    std::erase_if(others, [](const auto& known) { return known.second.expired(); });
    if (auto known = others.find(ref.id); known != others.end()) return known->second.lock();
    uint64_t bytes = 0;
    int fd = -1;
    try {
        fd = open_shared_file(ref.pid, ref.fd, false, "wait table", bytes);
    } catch (const SystemFailure&) {
        return nullptr;
    }
    void* mem =
        bytes == sizeof(WaitTablePage) ? mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (mem == MAP_FAILED) return nullptr;
    std::shared_ptr<WaitTable> table(new WaitTable());
    table->page_ = static_cast<WaitTablePage*>(mem);
    table->ref_ = {ref.id, ref.pid, ref.fd};
    // Another process may have reused the descriptor since.
    const WaitTablePage& page = *table->page_;
    if (page.magic != kWaitTableMagic || page.id != ref.id || page.pid != ref.pid) return nullptr;
    others[ref.id] = table;
    return table;
}

WaitTable::~WaitTable() {
    if (page_) munmap(page_, sizeof(WaitTablePage));
    if (fd_ >= 0) close(fd_);
}

int WaitTable::take_slot() {
    for (int i = 0; i < kWaits; ++i) {
        // In rotation, so that others can still ask a thread that left its slot why it left.
        int slot = int(unsigned(next_slot_.fetch_add(1)) % kWaits);
        uint64_t free = 0;
        if (page_->waits[slot].taken.compare_exchange_strong(free, 1)) return slot;
    }
    return -1;
}

const Seqlock<Promise>* WaitTable::promise_of(uint64_t comm, int rank, Promise& said,
                                              uint64_t& version) const {
    for (const Seqlock<Promise>& p : page_->promises) {
        if (p.version() == 0) continue;
        version = p.read(said);
        if (version != 0 && said.comm == comm && said.rank == rank) return &p;
    }
    return nullptr;
}

void WaitTable::promise(const Promise& promise) {
    Promise before;
    uint64_t version = 0;
    const Seqlock<Promise>* known = promise_of(promise.comm, promise.rank, before, version);
    size_t at = known ? size_t(known - page_->promises) : size_t(next_promise_.fetch_add(1)) % kPromises;
    page_->promises[at].publish(promise, next_number());
}

}  // namespace unicomm::shm
