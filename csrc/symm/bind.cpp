// The table for Python: addresses are whole numbers, checked by comms/memory/symmetric.py. What fails returns a
// fault as the shm transport has it (shm/bind_fault.hpp). All run without the interpreter's lock.
#include "core/bind.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "shm/dispatch.hpp"
#include "symm/cuda_ipc.hpp"
#include "symm/end.hpp"
#include "symm/library.hpp"
#include "symm/nvshmem.hpp"

namespace unicomm {
namespace {

using namespace symm;

struct Table {
    Vtbl vtbl;
};

UniqueId read_id(const nb::bytes& bytes) {
    UniqueId id;
    if (bytes.size() != sizeof id) throw nb::value_error("a unique id has 128 bytes");
    std::copy_n(bytes.c_str(), sizeof id, id.bytes);
    return id;
}

// The same table with fewer capabilities: what a library that lacks them looks like.
Table limited(const Table& table, uint64_t capabilities) {
    Table out{{table.vtbl.name, table.vtbl.capabilities & capabilities}};
#define UNICOMM_SYMM_KEEP(name, capability, ...) \
    if (out.vtbl.capabilities & uint64_t(Capability::capability)) out.vtbl.name = table.vtbl.name;
    UNICOMM_SYMM_FUNCTIONS(UNICOMM_SYMM_KEEP)
#undef UNICOMM_SYMM_KEEP
    return out;
}

nb::object fault_tuple_of(int code, const Error& error) { return fault_tuple(fault_of(code, error)); }

// Each row: own address, symmetric address, bytes, PE. One call for all, for there may be many small ones.
using Plan = nb::ndarray<const int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
nb::object transfer(End& e, bool put, Plan plan, Address stream) {
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

void bind_end(nb::module_& m) {
    using shm::deadline_after;
    nb::class_<End> end(m, "SymmDomain");
    bind_composites(end);
    end.def_prop_ro("capabilities", [](const End& e) { return e.table().capabilities; })
        .def("begins", &End::begins)
        .def("holds", &End::holds)
        .def("abort", [](End& e) { return e.call_now(e.table().abort, "abort"); })
        .def("leave", [](End& e) { return e.call_now(e.table().leave, "leave"); })
        .def("allocate",
             [](End& e, uint64_t bytes, uint64_t align, double timeout) {
                 void* out = nullptr;
                 e.met();
                 nb::object fault =
                     e.call(e.table().allocate, "allocate", bytes, align, deadline_after(timeout), &out);
                 if (fault.is_none()) e.allocated(reinterpret_cast<Address>(out), bytes);
                 return nb::make_tuple(fault, reinterpret_cast<Address>(out));
             })
        .def("free",
             [](End& e, Address address, double timeout) {
                 e.met();
                 nb::object fault =
                     e.call(e.table().free, "free", at<void>(address), deadline_after(timeout));
                 if (fault.is_none()) e.freed(address);
                 return fault;
             })
        .def("barrier",
             [](End& e, double timeout, Address stream) {
                 e.met();
                 return e.call(e.table().barrier, "barrier", deadline_after(timeout), at<void>(stream));
             })
        .def("ptr",
             [](End& e, Address address, uint64_t bytes, int pe) {
                 void* out = nullptr;
                 nb::object fault =
                     e.call_now(e.table().ptr, "ptr", at<const void>(address), bytes, pe, &out);
                 return nb::make_tuple(fault, reinterpret_cast<Address>(out));
             })
        .def("transfer", &transfer)
        .def("put",
             [](End& e, Address to, Address from, uint64_t bytes, int pe, Address stream) {
                 return e.call(e.table().put, "put", at<void>(to), at<const void>(from), bytes, pe,
                               at<void>(stream));
             })
        .def("get",
             [](End& e, Address to, Address from, uint64_t bytes, int pe, Address stream) {
                 return e.call(e.table().get, "get", at<void>(to), at<const void>(from), bytes, pe,
                               at<void>(stream));
             })
        .def("fence",
             [](End& e, Address stream) { return e.call(e.table().fence, "fence", at<void>(stream)); })
        .def("quiet",
             [](End& e, Address stream) { return e.call(e.table().quiet, "quiet", at<void>(stream)); })
        .def("put_signal",
             [](End& e, Address to, Address from, uint64_t bytes, Address signal, uint64_t value, int op,
                int pe, Address stream) {
                 return e.call(e.table().put_signal, "put_signal", at<void>(to), at<const void>(from), bytes,
                               at<uint64_t>(signal), value, SignalOp(op), pe, at<void>(stream));
             })
        .def("wait_signal",
             [](End& e, Address signal, int compare, uint64_t value, int source, double timeout,
                Address stream) {
                 return e.call(e.table().wait_signal, "wait_signal", at<const uint64_t>(signal),
                               Compare(compare), value, source, deadline_after(timeout), at<void>(stream));
             })
        .def("fetch_add",
             [](End& e, Address target, uint64_t value, int pe, Address stream) {
                 uint64_t before = 0;
                 nb::object fault = e.call(e.table().fetch_add, "fetch_add", at<uint64_t>(target), value, pe,
                                           &before, at<void>(stream));
                 return nb::make_tuple(fault, before);
             })
        .def("compare_swap",
             [](End& e, Address target, uint64_t expected, uint64_t value, int pe, Address stream) {
                 uint64_t before = 0;
                 nb::object fault = e.call(e.table().compare_swap, "compare_swap", at<uint64_t>(target),
                                           expected, value, pe, &before, at<void>(stream));
                 return nb::make_tuple(fault, before);
             })
        .def("team_split", [](End& e, int start, int stride, int size, double timeout) {
            Domain team = nullptr;
            nb::object fault = e.call(e.table().team_split, "team_split", start, stride, size,
                                      deadline_after(timeout), &team);
            return nb::make_tuple(
                fault, team ? nb::cast(std::make_shared<End>(e.table(), team, e.blocks())) : nb::none());
        });
    m.def(
        "symm_bytes",
        [](Ends end, Address address, uint64_t bytes) {
            nb::capsule owner(new Ends(end), [](void* p) noexcept { delete static_cast<Ends*>(p); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(at<void>(address), {size_t(bytes)}, owner);
        },
        "Memory that can be addressed here, as an array of bytes that holds the domain.");
    m.def(
        "symm_device_bytes",
        [](Ends end, Address address, uint64_t bytes, int device_type, int device) {
            nb::capsule owner(new Ends(end), [](void* p) noexcept { delete static_cast<Ends*>(p); });
            return nb::ndarray<uint8_t>(at<void>(address), {size_t(bytes)}, owner, {}, nb::dtype<uint8_t>(),
                                        device_type, device);
        },
        "The same of a device, with DLPack's number of its type.");
}

}  // namespace

void bind_symm(nb::module_& m) {
    nb::class_<Table>(m, "SymmTable")
        .def_prop_ro("name", [](const Table& t) { return std::string(t.vtbl.name); })
        .def_prop_ro("capabilities", [](const Table& t) { return t.vtbl.capabilities; })
        .def("limited", &limited)
        .def("unique_id",
             [](const Table& t, int world, uint64_t heap_bytes) {
                 UniqueId id;
                 Error error{};
                 int code = need(t.vtbl.unique_id, "unique_id")(world, heap_bytes, &id, &error);
                 return nb::make_tuple(fault_tuple_of(code, error),
                                       nb::bytes(id.bytes, code ? 0 : sizeof id));
             })
        .def("discard_id",
             [](const Table& t, const nb::bytes& bytes) {
                 UniqueId id = read_id(bytes);
                 Error error{};
                 return fault_tuple_of(need(t.vtbl.discard_id, "discard_id")(&id, &error), error);
             })
        .def("init", [](const Table& t, const nb::bytes& bytes, int rank, int world, const std::string& name,
                        double timeout) {
            UniqueId id = read_id(bytes);
            Error error{};
            Domain domain = nullptr;
            int code;
            {
                GilReleased release;
                code = need(t.vtbl.init, "init")(&id, rank, world, name.c_str(), shm::deadline_after(timeout),
                                                 &domain, &error);
            }
            nb::object end =
                code ? nb::none()
                     : nb::cast(std::make_shared<End>(t.vtbl, domain, std::make_shared<End::Blocks>()));
            return nb::make_tuple(fault_tuple_of(code, error), end);
        });
    m.def(
        "symm_cuda_ipc",
        [](const std::string& path, const std::string& prefix) {
            return Table{cuda_ipc_table(path, prefix)};
        },
        nb::arg("path"), nb::arg("prefix") = "cuda",
        "The table over the memory of CUDA devices of this host, by the runtime library of that name.");
    m.def(
        "symm_library", [](const std::string& path) { return Table{library_table(path)}; },
        "The table that a shared object exports; OSError where it is none for this version.");
    m.attr("symm_table_abi") = kTableAbi;
    m.def(
        "symm_nvshmem",
        [](const std::string& path, bool loaded) { return Table{nvshmem_table(path, loaded)}; },
        nb::arg("path"), nb::arg("loaded") = false,
        "The table over NVSHMEM's library of that name; with `loaded` only if it is in the process already.");
    m.def(
        "symm_nvshmem_info",
        [] {
            NvshmemInfo info = nvshmem_info();
            return nb::make_tuple(info.version, info.file, info.status);
        },
        "Of the opened NVSHMEM: (version, 30405 being 3.4.5; file; what nvshmemx_init_status says).");
    m.def("symm_host", [] { return Table{host_table()}; }, "The table over this host's shared memory.");
    bind_end(m);
    bind_symm_fast(m);
    bind_nccl_windows(m);
}

}  // namespace unicomm
