// The memory of other processes, read where it lies (process_vm_readv). Nothing has to be shared beforehand,
// but the kernel has to permit it: Yama, seccomp and user namespaces can forbid it, for single pairs, too.
#pragma once
#include <cstdint>
#include <utility>

namespace unicomm::shm {

// A word of a process that nobody can guess: where it is, and its value. Who can read it can read the memory
// of that process, and not that of another one which has got its pid, or of another program in it.
using Proof = std::pair<uint64_t, uint64_t>;
Proof proof_of_reading();
// Whether this process can read the memory of `pid`, which has this proof.
bool can_read(int pid, const Proof& proof);
// Copies from the process `pid`. Returns the number of bytes copied, which lie before the first that cannot
// be read.
uint64_t read_memory(int pid, uint64_t at, char* to, uint64_t bytes);

}  // namespace unicomm::shm
