// The extension module unicomm._core.
#include "base/bind.hpp"
#include "base/error.hpp"

NB_MODULE(_core, m) {
    m.doc() = "unicomm's native core. Private: use the package's Python modules.";
    // Objects held by a thread that never ended (a daemon, or a thread that a fork did not copy) are no
    // leaks.
    nb::set_leak_warnings(false);
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const unicomm::SystemFailure& e) {
            PyErr_SetString(PyExc_OSError, e.what());
        }
    });
    using unicomm::FaultCode;
    nb::enum_<FaultCode>(m, "FaultCode", nb::is_arithmetic())
        .value("NONE", FaultCode::kNone)
        .value("TIMEOUT", FaultCode::kTimeout)
        .value("PEER_LOST", FaultCode::kPeerLost)
        .value("MISMATCH", FaultCode::kMismatch)
        .value("ABORTED", FaultCode::kAborted)
        .value("INTERNAL", FaultCode::kInternal)
        .value("DEADLOCK", FaultCode::kDeadlock)
        .value("UNSUPPORTED", FaultCode::kUnsupported)
        .value("SILENT_CORRUPTION", FaultCode::kSilentCorruption);
    unicomm::bind_work(m);
    unicomm::bind_operations(m);
    unicomm::bind_recorder(m);
    unicomm::bind_dump(m);
    unicomm::bind_reduce(m);
    unicomm::bind_checksum(m);
    unicomm::bind_wire(m);
    unicomm::bind_shm(m);
    unicomm::bind_nccl(m);
    unicomm::bind_transport(m);
    unicomm::bind_ucx(m);
    unicomm::bind_tcp(m);
    unicomm::bind_hosts(m);
    unicomm::bind_symm(m);
}
