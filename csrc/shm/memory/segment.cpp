// Creates, opens and lays out segments.
#include "shm/memory/segment.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "shm/memory/shared_file.hpp"
#include "shm/waiting/wait_table.hpp"

namespace unicomm::shm {
namespace {

uint64_t page_align(uint64_t n) { return (n + 4095) & ~uint64_t{4095}; }

}  // namespace

Layout Layout::plan(int world, uint32_t slot_bytes, uint32_t p2p_bytes) {
    Layout l{};
    uint64_t n = static_cast<uint64_t>(world);
    l.world = world;
    // In the all-to-all patterns a slot holds one part per peer: a part must be at least a few cache lines
    // long.
    l.slot_bytes = static_cast<uint32_t>(page_align(std::max<uint64_t>(slot_bytes, 256 * n)));
    // With many small chunks the receiver reads while the sender writes; with many peers there is room for
    // few.
    uint64_t room = p2p_bytes / std::max<uint64_t>(n - 1, 1);
    l.p2p_depth = room >= kLargeRing ? 32 : room >= 64 * 1024 ? 16 : 4;
    uint64_t chunk = room / l.p2p_depth;
    l.p2p_chunk = static_cast<uint32_t>(std::clamp<uint64_t>(chunk / 1024 * 1024, 1024, 128 * 1024));
    l.controls = page_align(sizeof(SegmentHeader));
    l.announcements = page_align(l.controls + n * sizeof(RankControl));
    l.slots = page_align(l.announcements + 2 * n * sizeof(Announcement));
    l.channels = page_align(l.slots + 2 * n * l.slot_bytes);
    l.chunks = page_align(l.channels + n * n * sizeof(Channel));
    l.bytes = l.end_of_chunks();
    return l;
}

uint64_t Layout::end_of_chunks() const {
    uint64_t n = static_cast<uint64_t>(world);  // no rank sends to itself
    return page_align(chunks + n * (n - 1) * p2p_depth * (kLine + p2p_chunk));
}

Segment::Segment(int world, uint32_t slot_bytes, uint32_t p2p_bytes)
    : layout_(Layout::plan(world, slot_bytes, p2p_bytes)) {
    // Pages are allocated at the first access: a communicator without point-to-point messages, or with small
    // messages only, never uses the rest.
    fd_ = make_shared_file("unicomm", "shared-memory segment", layout_.bytes);
    map();
    SegmentHeader& h = header();
    h.bytes = layout_.bytes;
    h.world = layout_.world;
    h.slot_bytes = layout_.slot_bytes;
    h.p2p_chunk = layout_.p2p_chunk;
    h.p2p_depth = layout_.p2p_depth;
    h.id = id_ = random_id();
    h.magic = kMagic;
}

Segment::Segment(int pid, int fd) {
    uint64_t size = 0;
    fd_ = open_shared_file(pid, fd, true, "unicomm segment", size);
    SegmentHeader head;
    ssize_t got = pread(fd_, static_cast<void*>(&head), sizeof head, 0);
    bool good = got == static_cast<ssize_t>(sizeof head) && head.magic == kMagic && head.world > 0 &&
                head.world <= 65536 && head.bytes == size;
    if (good) {
        // Never trust lengths that another process wrote: the layout must come out as the same size.
        layout_ = Layout::plan(head.world, head.slot_bytes, 0);
        layout_.p2p_chunk = head.p2p_chunk;
        layout_.p2p_depth = head.p2p_depth;
        good = layout_.slot_bytes == head.slot_bytes &&
               (head.p2p_depth == 4 || head.p2p_depth == 16 || head.p2p_depth == 32) &&
               head.p2p_chunk % 1024 == 0 && head.p2p_chunk > 0 && head.p2p_chunk <= 128 * 1024;
        layout_.bytes = layout_.end_of_chunks();
        good = good && layout_.bytes == head.bytes;
    }
    if (!good) {
        close(fd_);
        throw SystemFailure("process " + std::to_string(pid) +
                            " offered something that is no unicomm segment");
    }
    id_ = head.id;
    map();
}

void Segment::map() {
    void* mem = mmap(nullptr, layout_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (mem == MAP_FAILED) {
        close(fd_);
        throw_errno("cannot map the shared-memory segment");
    }
    base_ = static_cast<char*>(mem);
}

void Segment::close_fd() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
}

Segment::~Segment() {
    close_fd();
    if (base_) munmap(base_, layout_.bytes);
}

}  // namespace unicomm::shm
