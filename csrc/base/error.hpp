// How the native core reports a failure. No exception crosses into Python: an operation returns a Fault,
// of which unicomm/comms/failures/faults.py makes the CommError.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace unicomm {

// Exported as unicomm._core.FaultCode. The numbers are in rings and on the wire: they never change.
enum class FaultCode : int32_t {
    kNone = 0,
    kTimeout = 1,   // culprits: ranks that had not arrived at the deadline
    kPeerLost = 2,  // culprits: ranks whose process is gone, or that left the communicator
    kMismatch = 3,  // culprits: the minority
    kAborted = 4,   // culprits: the rank that aborted
    kInternal = 5,
    kDeadlock = 6,     // culprits: ranks that wait for each other; claims: their operations, `root`: for whom
    kUnsupported = 7,  // the library cannot do that; nothing was done
    kSilentCorruption = 8,  // culprits: the minority among ranks whose outputs differ
};

// The operation that one rank called, for the message of a mismatch or a deadlock.
struct Claim {
    int32_t rank;
    uint32_t op;
    uint32_t dtype;
    uint32_t red;
    int32_t root;
    uint64_t count;
    uint64_t extra;
};

struct Fault {
    FaultCode code = FaultCode::kNone;
    std::vector<int32_t> culprits;
    std::vector<Claim> claims;
    std::string detail;
    int32_t by = -1;  // the rank that reported it; -1: this rank
    explicit operator bool() const { return code != FaultCode::kNone; }
};

// Failures of the operating system at creation (no memory, no permission), with errno's text.
struct SystemFailure : std::runtime_error {
    explicit SystemFailure(const std::string& what, int number = 0) : runtime_error(what), number(number) {}
    // Whether this process lacks memory or descriptors, so that no other rank is to blame.
    bool is_want() const;
    int number;  // errno, if there is one
};
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace unicomm
