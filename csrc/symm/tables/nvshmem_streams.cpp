// The functions of the NVSHMEM table that act in the order of a stream and return at once. Only barriers in
// the limited mode wait on the host.
#include "symm/tables/nvshmem_world.hpp"

namespace unicomm::symm::nvshmem {
namespace {

// Returns the number of the PE in the world, or -1 with the error.
int world_pe(const Pe& pe, int number, Error* error, int& code) {
    code = 0;
    if (auto lost = library->lost.load()) {
        code = report(*lost, error);
    } else if (pe.left || number < 0 || number >= int(pe.pes.size())) {
        code = report(pe.left ? "this rank has left" : "no such PE", error);
    }
    return code == 0 ? pe.pes[size_t(number)] : -1;
}

int barrier(Domain domain, uint64_t deadline, Stream stream, Error* error) {
    Pe& pe = pe_of(domain);
    int code;
    if (world_pe(pe, pe.rank, error, code) < 0) return code;
    if (pe.team != kTeamWorld) {
        int result = f().nvshmemx_barrier_on_stream(pe.team, stream);
        return result ? report("nvshmemx_barrier_on_stream failed with " + std::to_string(result), error) : 0;
    }
    if (pe.world->limited) {  // the barrier waits on the host, in memory that the processes share
        auto meet = [stream] { f().nvshmemx_barrier_all_on_stream(stream); };
        return blocking("barrier", deadline, meet, error, &pe.aborted);
    }
    f().nvshmemx_barrier_all_on_stream(stream);
    return 0;
}

int ptr(Domain domain, const void* address, uint64_t, int number, void** out, Error* error) {
    int code;
    int pe = world_pe(pe_of(domain), number, error, code);
    if (pe < 0) return code;
    *out = f().nvshmem_ptr(address, pe);
    return *out ? 0
                : report("the memory of PE " + std::to_string(number) +
                             " cannot be addressed from here, or the address is not in the symmetric heap",
                         error);
}

template <auto Function>
int copy(Domain domain, void* to, const void* from, uint64_t bytes, int number, Stream stream, Error* error) {
    int code;
    int pe = world_pe(pe_of(domain), number, error, code);
    if (pe < 0) return code;
    if (bytes != 0) (f().*Function)(to, from, bytes, pe, stream);
    return 0;
}

int quiet(Domain domain, Stream stream, Error* error) {
    int code;
    if (world_pe(pe_of(domain), pe_of(domain).rank, error, code) >= 0) f().nvshmemx_quiet_on_stream(stream);
    return code;
}

int put_signal(Domain domain, void* to, const void* from, uint64_t bytes, uint64_t* signal, uint64_t value,
               SignalOp op, int number, Stream stream, Error* error) {
    int code;
    int pe = world_pe(pe_of(domain), number, error, code);
    if (pe < 0) return code;
    int how = op == SignalOp::kSet ? kSignalSet : kSignalAdd;
    if (bytes == 0) {
        f().nvshmemx_signal_op_on_stream(signal, value, how, pe, stream);
    } else {
        f().nvshmemx_putmem_signal_on_stream(to, from, bytes, signal, value, how, pe, stream);
    }
    return 0;
}

int number_of(Compare compare) {
    switch (compare) {
        case Compare::kEq:
            return kCmpEq;
        case Compare::kNe:
            return kCmpNe;
        case Compare::kGt:
            return kCmpGt;
        case Compare::kGe:
            return kCmpGe;
        case Compare::kLt:
            return kCmpLt;
        case Compare::kLe:
            return kCmpLe;
    }
    return -1;
}

// Neither the deadline nor `source` has an effect: the stream waits, and the host cannot end that. A change
// that makes the comparison true ends it, such as a put of this rank to itself.
int wait_signal(Domain domain, const uint64_t* signal, Compare compare, uint64_t value, int, uint64_t,
                Stream stream, Error* error) {
    Pe& pe = pe_of(domain);
    int code;
    if (world_pe(pe, pe.rank, error, code) < 0) return code;
    if (number_of(compare) < 0) return report("no such comparison", error);
    if ((code = refuse_limited(pe, "a stream that waits for a signal", error))) return code;
    f().nvshmemx_signal_wait_until_on_stream(const_cast<uint64_t*>(signal), number_of(compare), value,
                                             stream);
    return 0;
}

}  // namespace

void put_on_streams(Vtbl& t) {
    t.barrier = barrier, t.ptr = ptr;
    t.put = copy<&Functions::nvshmemx_putmem_on_stream>;
    t.get = copy<&Functions::nvshmemx_getmem_on_stream>;
    t.put_nbi = copy<&Functions::nvshmemx_putmem_nbi_on_stream>;
    t.get_nbi = copy<&Functions::nvshmemx_getmem_nbi_on_stream>;
    t.fence = t.quiet = quiet;  // there is no fence on a stream; quiet orders more
    t.put_signal = put_signal, t.wait_signal = wait_signal;
}

}  // namespace unicomm::symm::nvshmem
