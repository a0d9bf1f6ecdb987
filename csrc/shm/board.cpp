#include "shm/board.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <map>

#include "core/error.hpp"
#include "shm/shared_file.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kBoardMagic = 0x314452424d4f4355ull;  // "UCOMBRD1"

struct Known {
    std::mutex mutex;
    std::weak_ptr<Board> own;
    std::map<uint64_t, std::weak_ptr<const Board>> others;
};
Known* known_boards = new Known();

// A forked child has none of them, and another thread may have held the mutex.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { known_boards = new Known(); });

}  // namespace

uint64_t random_id() {
    uint64_t id = 0;
    while (id == 0) {
        if (getrandom(&id, sizeof id, 0) != sizeof id) id = 0;
    }
    return id;
}

std::shared_ptr<Board> Board::mine() {
    std::lock_guard lock(known_boards->mutex);
    std::shared_ptr<Board> board = known_boards->own.lock();
    if (board) return board;
    board.reset(new Board());
    try {
        board->fd_ = make_shared_file("unicomm-waits", "board", sizeof(BoardPage));
    } catch (const SystemFailure&) {
        return nullptr;
    }
    board->ref_ = {random_id(), getpid(), board->fd_};
    void* mem = mmap(nullptr, sizeof(BoardPage), PROT_READ | PROT_WRITE, MAP_SHARED, board->fd_, 0);
    if (mem == MAP_FAILED) return nullptr;
    board->page_ = static_cast<BoardPage*>(mem);
    board->page_->magic = kBoardMagic;
    board->page_->id = board->ref_.id;
    board->page_->pid = board->ref_.pid;
    known_boards->own = board;
    return board;
}

std::shared_ptr<const Board> Board::open(const BoardRef& ref) {
    std::lock_guard lock(known_boards->mutex);
    if (ref.id == 0) return nullptr;
    if (auto board = known_boards->own.lock(); board && board->ref_.id == ref.id) return board;
    auto& others = known_boards->others;
    std::erase_if(others, [](const auto& known) { return known.second.expired(); });
    if (auto known = others.find(ref.id); known != others.end()) return known->second.lock();
    uint64_t bytes = 0;
    int fd = -1;
    try {
        fd = open_shared_file(ref.pid, ref.fd, false, "board", bytes);
    } catch (const SystemFailure&) {
        return nullptr;
    }
    void* mem = bytes == sizeof(BoardPage) ? mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (mem == MAP_FAILED) return nullptr;
    std::shared_ptr<Board> board(new Board());
    board->page_ = static_cast<BoardPage*>(mem);
    board->ref_ = {ref.id, ref.pid, ref.fd};
    // Another process may have got the number since.
    const BoardPage& page = *board->page_;
    if (page.magic != kBoardMagic || page.id != ref.id || page.pid != ref.pid) return nullptr;
    others[ref.id] = board;
    return board;
}

Board::~Board() {
    if (page_) munmap(page_, sizeof(BoardPage));
    if (fd_ >= 0) close(fd_);
}

int Board::take_slot() {
    for (int i = 0; i < kWaits; ++i) {
        // By turns: who left a slot can be asked for a while yet why it did.
        int slot = int(unsigned(next_slot_.fetch_add(1)) % kWaits);
        uint64_t free = 0;
        if (page_->waits[slot].taken.compare_exchange_strong(free, 1)) return slot;
    }
    return -1;
}

const Published<Promise>* Board::promise_of(uint64_t comm, int rank, Promise& said, uint64_t& version) const {
    for (const Published<Promise>& p : page_->promises) {
        if (p.version() == 0) continue;
        version = p.read(said);
        if (version != 0 && said.comm == comm && said.rank == rank) return &p;
    }
    return nullptr;
}

void Board::promise(const Promise& promise) {
    Promise before;
    uint64_t version = 0;
    const Published<Promise>* known = promise_of(promise.comm, promise.rank, before, version);
    size_t at = known ? size_t(known - page_->promises) : size_t(next_promise_.fetch_add(1)) % kPromises;
    page_->promises[at].publish(promise, next_number());
}

}  // namespace unicomm::shm
