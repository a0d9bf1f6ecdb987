// Bindings of tables and domains. Addresses are integers, which comms/memory/symmetric.py checks. A failure
// is returned as a fault (base/bind_fault.hpp). Calls that may wait release the GIL.
#include "base/bind.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "shm/dispatch.hpp"
#include "symm/domain.hpp"
#include "symm/table_error.hpp"
#include "symm/tables/tables.hpp"

namespace unicomm {
namespace {

using namespace symm;

struct Table {
    Vtbl vtbl;
};

// The same table with fewer capabilities, as of a library that lacks them.
Table limited(const Table& table, uint64_t capabilities) {
    Table out{{table.vtbl.name, table.vtbl.capabilities & capabilities}};
#define UNICOMM_SYMM_KEEP(name, capability, ...) \
    if (out.vtbl.capabilities & uint64_t(Capability::capability)) out.vtbl.name = table.vtbl.name;
    UNICOMM_SYMM_FUNCTIONS(UNICOMM_SYMM_KEEP)
#undef UNICOMM_SYMM_KEEP
    return out;
}

nb::object fault_tuple_of(int code, const Error& error) { return fault_tuple(fault_of(code, error)); }

// Each row: own address, symmetric address, bytes, PE. One call moves all of them, because there may be many
// small ones.
using Plan = nb::ndarray<const int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
nb::object transfer(SymmDomain& e, bool put, Plan plan, Address stream) {
    need(e.table().put_nbi, "put_nbi");
    Error error{};
    int code = 0;
    {
        GilReleased release;
        std::lock_guard lock(e.running());
        const int64_t* row = plan.data();
        for (size_t i = 0; i < plan.shape(0) && code == 0; ++i, row += 4) {
            auto own = at<void>(Address(row[0])), other = at<void>(Address(row[1]));
            auto bytes = uint64_t(row[2]);
            int pe = int(row[3]);
            code = put ? e.table().put_nbi(e.domain(), other, own, bytes, pe, at<void>(stream), &error)
                       : e.table().get_nbi(e.domain(), own, other, bytes, pe, at<void>(stream), &error);
        }
        if (code == 0) code = e.table().quiet(e.domain(), at<void>(stream), &error);
    }
    return fault_tuple_of(code, error);
}

void bind_domain(nb::module_& m) {
    nb::class_<SymmDomain> end(
        m, "SymmDomain", "One PE's end of a symmetric heap: csrc/symm/table.hpp. Addresses are integers.");
    bind_composites(end);
    end.def_prop_ro("capabilities", [](const SymmDomain& e) { return e.table().capabilities; })
        .def("begins", &SymmDomain::begins, nb::sig("def begins(self, address: int, /) -> bool"))
        .def("holds", &SymmDomain::holds, nb::sig("def holds(self, address: int, bytes: int, /) -> bool"))
        .def(
            "abort",
            [](SymmDomain& e, int code, const std::vector<int>& culprits) {
                Error why{};
                report(FaultCode(code), "", &why, culprits);
                return e.call_now(e.table().abort, "abort", code, static_cast<const Error*>(&why));
            },
            nb::arg("code") = 0, nb::arg("culprits") = std::vector<int>{},
            nb::sig("def abort(self, code: int = 0, culprits: Sequence[int] = ()) -> Fault | None"))
        .def(
            "leave", [](SymmDomain& e) { return e.call_now(e.table().leave, "leave"); },
            nb::sig("def leave(self) -> Fault | None"))
        .def(
            "allocate",
            [](SymmDomain& e, uint64_t bytes, uint64_t align, double timeout) {
                void* out = nullptr;
                e.count_meeting();
                nb::object fault =
                    e.call(e.table().allocate, "allocate", bytes, align, deadline_after(timeout), &out);
                if (fault.is_none()) e.allocated(reinterpret_cast<Address>(out), bytes);
                return nb::make_tuple(fault, reinterpret_cast<Address>(out));
            },
            nb::sig(
                "def allocate(self, bytes: int, align: int, timeout: float, /) -> tuple[Fault | None, int]"))
        .def(
            "free",
            [](SymmDomain& e, Address address, double timeout) {
                e.count_meeting();
                nb::object fault = e.call(e.table().free, "free", at<void>(address), deadline_after(timeout));
                if (fault.is_none()) e.freed(address);
                return fault;
            },
            nb::sig("def free(self, address: int, timeout: float, /) -> Fault | None"))
        .def(
            "barrier",
            [](SymmDomain& e, double timeout, Address stream) {
                e.count_meeting();
                return e.call(e.table().barrier, "barrier", deadline_after(timeout), at<void>(stream));
            },
            nb::sig("def barrier(self, timeout: float, stream: int, /) -> Fault | None"))
        .def(
            "ptr",
            [](SymmDomain& e, Address address, uint64_t bytes, int pe) {
                void* out = nullptr;
                nb::object fault = e.call_now(e.table().ptr, "ptr", at<const void>(address), bytes, pe, &out);
                return nb::make_tuple(fault, reinterpret_cast<Address>(out));
            },
            nb::sig("def ptr(self, address: int, bytes: int, pe: int, /) -> tuple[Fault | None, int]"))
        .def("transfer", &transfer,
             nb::sig("def transfer(self, put: bool, plan: NDArray[Any], stream: int, /) -> Fault | None"))
        .def(
            "put",
            [](SymmDomain& e, Address to, Address from, uint64_t bytes, int pe, Address stream) {
                return e.call(e.table().put, "put", at<void>(to), at<const void>(from), bytes, pe,
                              at<void>(stream));
            },
            nb::sig(
                "def put(self, to: int, source: int, bytes: int, pe: int, stream: int, /) -> Fault | None"))
        .def(
            "get",
            [](SymmDomain& e, Address to, Address from, uint64_t bytes, int pe, Address stream) {
                return e.call(e.table().get, "get", at<void>(to), at<const void>(from), bytes, pe,
                              at<void>(stream));
            },
            nb::sig(
                "def get(self, to: int, source: int, bytes: int, pe: int, stream: int, /) -> Fault | None"))
        .def(
            "fence",
            [](SymmDomain& e, Address stream) { return e.call(e.table().fence, "fence", at<void>(stream)); },
            nb::sig("def fence(self, stream: int, /) -> Fault | None"))
        .def(
            "quiet",
            [](SymmDomain& e, Address stream) { return e.call(e.table().quiet, "quiet", at<void>(stream)); },
            nb::sig("def quiet(self, stream: int, /) -> Fault | None"))
        .def(
            "put_signal",
            [](SymmDomain& e, Address to, Address from, uint64_t bytes, Address signal, uint64_t value,
               int op, int pe, Address stream) {
                return e.call(e.table().put_signal, "put_signal", at<void>(to), at<const void>(from), bytes,
                              at<uint64_t>(signal), value, SignalOp(op), pe, at<void>(stream));
            },
            nb::sig("def put_signal(self, to: int, source: int, bytes: int, signal: int, value: int, op: "
                    "int, pe: int, stream: int, /) -> Fault | None"))
        .def(
            "wait_signal",
            [](SymmDomain& e, Address signal, int compare, uint64_t value, int source, double timeout,
               Address stream) {
                return e.call(e.table().wait_signal, "wait_signal", at<const uint64_t>(signal),
                              Compare(compare), value, source, deadline_after(timeout), at<void>(stream));
            },
            nb::sig("def wait_signal(self, signal: int, compare: int, value: int, source: int, timeout: "
                    "float, stream: int, /) -> Fault | None"))
        .def(
            "fetch_add",
            [](SymmDomain& e, Address target, uint64_t value, int pe, Address stream) {
                uint64_t before = 0;
                nb::object fault = e.call(e.table().fetch_add, "fetch_add", at<uint64_t>(target), value, pe,
                                          &before, at<void>(stream));
                return nb::make_tuple(fault, before);
            },
            nb::sig("def fetch_add(self, target: int, value: int, pe: int, stream: int, /) -> tuple[Fault | "
                    "None, int]"))
        .def(
            "compare_swap",
            [](SymmDomain& e, Address target, uint64_t expected, uint64_t value, int pe, Address stream) {
                uint64_t before = 0;
                nb::object fault = e.call(e.table().compare_swap, "compare_swap", at<uint64_t>(target),
                                          expected, value, pe, &before, at<void>(stream));
                return nb::make_tuple(fault, before);
            },
            nb::sig("def compare_swap(self, target: int, expected: int, value: int, pe: int, stream: int, /) "
                    "-> tuple[Fault | None, int]"))
        .def(
            "team_split",
            [](SymmDomain& e, int start, int stride, int size, double timeout) {
                Domain team = nullptr;
                nb::object fault = e.call(e.table().team_split, "team_split", start, stride, size,
                                          deadline_after(timeout), &team);
                return nb::make_tuple(
                    fault,
                    team ? nb::cast(std::make_shared<SymmDomain>(e.table(), team, e.blocks())) : nb::none());
            },
            nb::sig("def team_split(self, start: int, stride: int, size: int, timeout: float, /) -> "
                    "tuple[Fault | None, SymmDomain | None]"));
    m.def(
        "symm_bytes",
        [](SymmDomainPtr end, Address address, uint64_t bytes) {
            nb::capsule owner(new SymmDomainPtr(end),
                              [](void* p) noexcept { delete static_cast<SymmDomainPtr*>(p); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(at<void>(address), {size_t(bytes)}, owner);
        },
        "Memory that this process can address, as an array of bytes that keeps the domain alive.",
        nb::sig("def symm_bytes(domain: SymmDomain, address: int, bytes: int, /) -> NDArray[Any]"));
    m.def(
        "symm_device_bytes",
        [](SymmDomainPtr end, Address address, uint64_t bytes, int device_type, int device) {
            nb::capsule owner(new SymmDomainPtr(end),
                              [](void* p) noexcept { delete static_cast<SymmDomainPtr*>(p); });
            return nb::ndarray<uint8_t>(at<void>(address), {size_t(bytes)}, owner, {}, nb::dtype<uint8_t>(),
                                        device_type, device);
        },
        "The same for device memory, with DLPack's device type.",
        nb::sig("def symm_device_bytes(domain: SymmDomain, address: int, bytes: int, device_type: int, "
                "device: int, /) -> Any"));
}

}  // namespace

void bind_symm(nb::module_& m) {
    nb::class_<Table>(m, "SymmTable", "What a SHMEM library can do.")
        .def_prop_ro("name", [](const Table& t) { return std::string(t.vtbl.name); })
        .def_prop_ro("capabilities", [](const Table& t) { return t.vtbl.capabilities; })
        .def("limited", &limited, nb::sig("def limited(self, capabilities: int, /) -> SymmTable"))
        .def(
            "unique_id",
            [](const Table& t, int world, uint64_t heap_bytes) {
                UniqueId id;
                Error error{};
                int code = need(t.vtbl.unique_id, "unique_id")(world, heap_bytes, &id, &error);
                return nb::make_tuple(fault_tuple_of(code, error), nb::bytes(id.bytes, code ? 0 : sizeof id));
            },
            nb::sig("def unique_id(self, world: int, heap_bytes: int, /) -> tuple[Fault | None, bytes]"))
        .def(
            "discard_id",
            [](const Table& t, const nb::bytes& bytes) {
                UniqueId id = read_id<UniqueId>(bytes);
                Error error{};
                return fault_tuple_of(need(t.vtbl.discard_id, "discard_id")(&id, &error), error);
            },
            nb::sig("def discard_id(self, uid: bytes, /) -> Fault | None"))
        .def(
            "init",
            [](const Table& t, const nb::bytes& bytes, int rank, int world, const std::string& name,
               double timeout) {
                UniqueId id = read_id<UniqueId>(bytes);
                Error error{};
                Domain domain = nullptr;
                int code;
                {
                    GilReleased release;
                    code = need(t.vtbl.init, "init")(&id, rank, world, name.c_str(), deadline_after(timeout),
                                                     &domain, &error);
                }
                nb::object end = code ? nb::none()
                                      : nb::cast(std::make_shared<SymmDomain>(
                                            t.vtbl, domain, std::make_shared<SymmDomain::Blocks>()));
                return nb::make_tuple(fault_tuple_of(code, error), end);
            },
            nb::sig("def init(self, uid: bytes, rank: int, world: int, name: str, timeout: float, /) -> "
                    "tuple[Fault | None, SymmDomain | None]"));
    m.def(
        "symm_cuda_ipc",
        [](const std::string& path, const std::string& prefix) {
            return Table{cuda_ipc_table(path, prefix)};
        },
        nb::arg("path"), nb::arg("prefix") = "cuda",
        "The table over memory of this host's CUDA or HIP devices.");
    m.def(
        "symm_library", [](const std::string& path) { return Table{shared_object_table(path)}; },
        nb::arg("path"), "The table that a shared object exports; OSError if it has none for this version.");
    m.attr("symm_table_abi") = kTableAbi;
    m.def(
        "symm_nvshmem",
        [](const std::string& path, bool loaded) { return Table{nvshmem_table(path, loaded)}; },
        nb::arg("path"), nb::arg("loaded") = false,
        "The table over NVSHMEM; with `loaded` only if the library is already in the process.");
    m.def(
        "symm_nvshmem_info",
        [] {
            NvshmemInfo info = nvshmem_info();
            return std::tuple(info.version, info.file, info.status);
        },
        "(version, file, nvshmemx_init_status) of the opened NVSHMEM; version 30405 is 3.4.5.");
    m.def("symm_host", [] { return Table{host_table()}; }, "The table over this host's shared memory.");
    bind_domain(m);
    bind_symm_fast(m);
    bind_nccl_windows(m);
}

}  // namespace unicomm
