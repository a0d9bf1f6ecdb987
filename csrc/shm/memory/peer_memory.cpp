// Reads the memory of other processes.
#include "shm/memory/peer_memory.hpp"

#include <sys/random.h>
#include <sys/uio.h>

#include <cerrno>

#include "base/clock.hpp"

namespace unicomm::shm {

Proof proof_of_reading() {
    static const uint64_t word = [] {
        uint64_t random = 0;
        if (getrandom(&random, sizeof random, 0) != sizeof random) random = clock_ns(CLOCK_MONOTONIC);
        return random | 1;
    }();
    return {reinterpret_cast<uint64_t>(&word), word};
}

bool can_read(int pid, const Proof& proof) {
    uint64_t word = 0;
    auto* to = reinterpret_cast<char*>(&word);
    return read_memory(pid, proof.first, to, sizeof word) == sizeof word && word == proof.second;
}

uint64_t read_memory(int pid, uint64_t at, char* to, uint64_t bytes) {
    uint64_t done = 0;
    while (done < bytes) {
        iovec local{to + done, bytes - done};
        iovec remote{reinterpret_cast<void*>(at + done), bytes - done};
        ssize_t got = process_vm_readv(pid, &local, 1, &remote, 1, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        done += uint64_t(got);
    }
    return done;
}

}  // namespace unicomm::shm
