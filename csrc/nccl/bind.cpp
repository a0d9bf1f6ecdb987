// Bindings of the library's functions, with pointers as integers. Each returns the library's result, followed
// by what it creates; arguments are not checked here. Calls that may wait release the GIL.
#include "base/bind.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "nccl/allocator.hpp"
#include "nccl/config.hpp"
#include "nccl/library.hpp"
#include "nccl/unfinished_calls.hpp"

namespace unicomm {
namespace {

using namespace nccl;

template <class T>
using Plain = std::conditional_t<std::is_pointer_v<T>, uintptr_t, T>;

template <class T>
T as(Plain<T> value) {
    if constexpr (std::is_pointer_v<T>)
        return reinterpret_cast<T>(value);
    else
        return value;
}

[[noreturn]] void absent(const char* name) {
    throw nb::attribute_error((std::string("the library has no nccl") + name).c_str());
}

template <class F>
F* need(F* function, const char* name) {
    if (function == nullptr) absent(name);
    return function;
}

// A function that takes only numbers and addresses. `parameters` are their names, for the stub: names known
// to nanobind itself would make each call slower.
template <class... A>
void plain(nb::class_<Library>& c, const char* name, int (*Functions::*member)(A...), const char* symbol,
           const char* parameters) {
    std::string signature = std::string("def ") + name + "(self";
    // Without a stream, which would bring the C++ library's locales into the wheel.
    size_t count = 0;
    for (std::string_view rest(parameters); !rest.empty(); ++count) {
        size_t length = std::min(rest.find(' '), rest.size());
        signature += ", " + std::string(rest.substr(0, length)) + ": int";
        rest.remove_prefix(std::min(length + 1, rest.size()));
    }
    if (count != sizeof...(A)) throw std::logic_error(signature + ": one name for each parameter");
    signature += sizeof...(A) ? ", /) -> int" : ") -> int";
    c.def(
        name,
        [member, symbol](const Library& self, Plain<A>... args) {
            auto function = need(self().*member, symbol);
            GilReleased release;
            return function(as<A>(args)...);
        },
        nb::sig(signature.c_str()));
}

// Calls a function that writes one value through its last pointer.
template <class R, class... A>
auto out(const Library& self, int (*Functions::*member)(A...), const char* symbol, auto... before) {
    auto function = need(self().*member, symbol);
    R value{};
    GilReleased release;
    int result = function(before..., &value);
    return std::pair(result, value);
}

nb::bytes write_id(const UniqueId& id) { return nb::bytes(id.bytes, sizeof id.bytes); }

using Settings = std::vector<Setting>;
using Created = std::pair<int, uintptr_t>;

Created created(int result, void* what) { return {result, reinterpret_cast<uintptr_t>(what)}; }
Comm comm_of(uintptr_t comm) { return reinterpret_cast<Comm>(comm); }
Device device_of(uintptr_t set, int index) { return {reinterpret_cast<int (*)(int)>(set), index}; }

// What a call that creates a communicator reads.
struct Inputs {
    FilledConfig config;
    std::vector<UniqueId> ids;
    std::vector<int> without;

    Inputs(const Library& library, const Settings& settings) : config(library.version(), settings) {}
};

// Runs a call that creates something, without the GIL, and waits until it is complete; see `create`.
template <class In, class Call, class State>
Created create_within(double seconds, std::unique_ptr<Creation<In>> creation, Call call, State state) {
    auto [result, what] = create(
        std::move(creation), seconds,
        [&](Creation<In>& c) {
            GilReleased release;
            return call(c);
        },
        state,
        [] {
            GilReleased release;
            pause_briefly();
        });
    return created(result, what);
}

// The state of the parent, of which Python code asks: other threads may ask at the same time, or end it.
auto parent_state(const nb::callable& state) {
    return [&state](void*) { return nb::cast<int>(state()); };
}

// The state of the communicator that is created. Nobody else knows it.
auto own_state(const Library& self) {
    return [&self](void* made) { return made == nullptr ? kInProgress : state_of(self(), made); };
}

std::unique_ptr<Creation<Inputs>> creation(const Library& self, const Settings& settings) {
    return std::unique_ptr<Creation<Inputs>>(new Creation<Inputs>{{self, settings}});
}

void bind_life(nb::class_<Library>& c) {
    c.def(
        "unique_id",
        [](const Library& self) {
            UniqueId id;
            int result = need(self().GetUniqueId, "GetUniqueId")(&id);
            return std::pair(result, write_id(id));
        },
        nb::sig("def unique_id(self) -> tuple[int, bytes]"));
    c.def(
        "init",
        [](const Library& self, int size, const nb::bytes& id, int rank, const Settings& settings,
           double seconds) {
            auto configured = self().CommInitRankConfig;
            auto bare = need(self().CommInitRank, "CommInitRank");
            auto made = creation(self, settings);
            made->inputs.ids.push_back(read_id<UniqueId>(id));
            return create_within(
                seconds, std::move(made),
                [&](auto& c) {
                    const UniqueId& read = c.inputs.ids[0];
                    return configured != nullptr
                               ? configured(&c.place, size, read, rank, c.inputs.config.get())
                               : bare(&c.place, size, read, rank);
                },
                own_state(self));
        },
        nb::sig("def init(self, size: int, id: bytes, rank: int, settings: Sequence[tuple[str, int | str]], "
                "seconds: float, /) -> tuple[int, int]"));
    c.def(
        "init_scalable",
        [](const Library& self, int size, int rank, const std::vector<nb::bytes>& ids,
           const Settings& settings, double seconds) {
            auto function = need(self().CommInitRankScalable, "CommInitRankScalable");
            auto made = creation(self, settings);
            for (const nb::bytes& id : ids) made->inputs.ids.push_back(read_id<UniqueId>(id));
            return create_within(
                seconds, std::move(made),
                [&](auto& c) {
                    auto& read = c.inputs.ids;
                    return function(&c.place, size, rank, static_cast<int>(read.size()), read.data(),
                                    c.inputs.config.get());
                },
                own_state(self));
        },
        nb::sig("def init_scalable(self, size: int, rank: int, ids: Sequence[bytes], settings: "
                "Sequence[tuple[str, int | str]], seconds: float, /) -> tuple[int, int]"));
    c.def(
        "split",
        [](const Library& self, uintptr_t parent, int color, int key, const Settings& settings,
           double seconds, const nb::callable& state) {
            auto function = need(self().CommSplit, "CommSplit");
            return create_within(
                seconds, creation(self, settings),
                [&](auto& c) {
                    return function(comm_of(parent), color, key, &c.place, c.inputs.config.get());
                },
                parent_state(state));
        },
        nb::sig("def split(self, parent: int, color: int, key: int, settings: Sequence[tuple[str, int | "
                "str]], seconds: float, state: Callable[[], int], /) -> tuple[int, int]"),
        "`state()` returns the state of the parent.");
    c.def(
        "shrink",
        [](const Library& self, uintptr_t parent, std::vector<int> without, const Settings& settings,
           bool abort, double seconds, const nb::callable& state) {
            auto function = need(self().CommShrink, "CommShrink");
            auto made = creation(self, settings);
            made->inputs.without = std::move(without);
            return create_within(
                seconds, std::move(made),
                [&](auto& c) {
                    auto& excluded = c.inputs.without;
                    return function(comm_of(parent), excluded.data(), static_cast<int>(excluded.size()),
                                    &c.place, c.inputs.config.get(), abort ? 1 : 0);
                },
                parent_state(state));
        },
        nb::sig("def shrink(self, parent: int, without: Sequence[int], settings: Sequence[tuple[str, int | "
                "str]], abort: bool, seconds: float, state: Callable[[], int], /) -> tuple[int, int]"),
        "`state()` returns the state of the parent.");
    c.def(
        "grow",
        [](const Library& self, uintptr_t parent, int size, const nb::bytes& id, int rank,
           const Settings& settings, double seconds, const nb::callable& state) {
            auto function = need(self().CommGrow, "CommGrow");
            auto made = creation(self, settings);
            if (id.size() != 0) made->inputs.ids.push_back(read_id<UniqueId>(id));
            auto call = [&](auto& c) {
                const UniqueId* read = c.inputs.ids.empty() ? nullptr : c.inputs.ids.data();
                return function(comm_of(parent), size, read, rank, &c.place, c.inputs.config.get());
            };
            return parent != 0 ? create_within(seconds, std::move(made), call, parent_state(state))
                               : create_within(seconds, std::move(made), call, own_state(self));
        },
        nb::sig("def grow(self, parent: int, size: int, id: bytes, rank: int, settings: Sequence[tuple[str, "
                "int | str]], seconds: float, state: Callable[[], int], /) -> tuple[int, int]"),
        "A member passes its communicator, and the id if it has asked for it; a new rank passes parent 0 and "
        "the id. `state()` returns the state of the parent, and is not called without one.");
    c.def(
        "comm_unique_id",
        [](const Library& self, uintptr_t comm) {
            UniqueId id{};
            int result = need(self().CommGetUniqueId, "CommGetUniqueId")(comm_of(comm), &id);
            return std::pair(result, write_id(id));
        },
        nb::sig("def comm_unique_id(self, comm: int, /) -> tuple[int, bytes]"));
    c.def(
        "end",
        [](const Library& self, uintptr_t comm, double seconds, uintptr_t set_device, int device) {
            need(self().CommDestroy, "CommDestroy");
            GilReleased release;
            return run_within(seconds, device_of(set_device, device), [functions = self(), comm] {
                return finalize_and_destroy(functions, comm_of(comm));
            });
        },
        nb::sig("def end(self, comm: int, seconds: float, set_device: int, device: int, /) -> int"),
        "Finalizes and destroys; kInProgress if that takes longer, and it continues. `set_device` is the "
        "address of cudaSetDevice or hipSetDevice, or 0.");
    c.def(
        "abort",
        [](const Library& self, uintptr_t comm, double seconds, uintptr_t set_device, int device) {
            auto function = need(self().CommAbort, "CommAbort");
            GilReleased release;
            return run_within(seconds, device_of(set_device, device),
                              [function, comm] { return function(comm_of(comm)); });
        },
        nb::sig("def abort(self, comm: int, seconds: float, set_device: int, device: int, /) -> int"),
        "Aborts; kInProgress if that takes longer, and it continues. `set_device` as in `end`.");
    c.def(
        "revoke",
        [](const Library& self, uintptr_t comm, double seconds, uintptr_t set_device, int device) {
            need(self().CommRevoke, "CommRevoke");
            auto abort = need(self().CommAbort, "CommAbort");
            GilReleased release;
            return run_within(
                seconds, device_of(set_device, device),
                [functions = self(), comm, seconds] {
                    return revoke_or_abort(functions, comm_of(comm), 0.8 * seconds);
                },
                [abort, comm] { abort(comm_of(comm)); });
        },
        nb::sig("def revoke(self, comm: int, seconds: float, set_device: int, device: int, /) -> int"),
        "Revokes; kInProgress if that takes longer. It then continues, and aborts the communicator. "
        "`set_device` as in `end`.");
    plain(c, "suspend", &Functions::CommSuspend, "CommSuspend", "comm flags");
    plain(c, "resume", &Functions::CommResume, "CommResume", "comm");
    c.def(
        "async_error",
        [](const Library& self, uintptr_t comm) {
            return out<int>(self, &Functions::CommGetAsyncError, "CommGetAsyncError", comm_of(comm));
        },
        nb::sig("def async_error(self, comm: int, /) -> tuple[int, int]"));
    c.def(
        "count",
        [](const Library& self, uintptr_t comm) {
            return out<int>(self, &Functions::CommCount, "CommCount", comm_of(comm));
        },
        nb::sig("def count(self, comm: int, /) -> tuple[int, int]"));
    c.def(
        "user_rank",
        [](const Library& self, uintptr_t comm) {
            return out<int>(self, &Functions::CommUserRank, "CommUserRank", comm_of(comm));
        },
        nb::sig("def user_rank(self, comm: int, /) -> tuple[int, int]"));
    c.def(
        "device",
        [](const Library& self, uintptr_t comm) {
            return out<int>(self, &Functions::CommCuDevice, "CommCuDevice", comm_of(comm));
        },
        nb::sig("def device(self, comm: int, /) -> tuple[int, int]"));
    c.def(
        "mem_stats",
        [](const Library& self, uintptr_t comm, int which) {
            return out<uint64_t>(self, &Functions::CommMemStats, "CommMemStats", comm_of(comm), which);
        },
        nb::sig("def mem_stats(self, comm: int, which: int, /) -> tuple[int, int]"));
}

Allocator allocator_of(const Library& self) {
    return Allocator::of(need(self().MemAlloc, "MemAlloc"), need(self().MemFree, "MemFree"));
}

void bind_memory(nb::class_<Library>& c) {
    c.def(
        "mem_alloc",
        [](const Library& self, size_t bytes) {
            auto function = need(self().MemAlloc, "MemAlloc");
            void* memory = nullptr;
            GilReleased release;
            int result = function(&memory, bytes);
            return created(result, memory);
        },
        nb::sig("def mem_alloc(self, bytes: int, /) -> tuple[int, int]"));
    plain(c, "mem_free", &Functions::MemFree, "MemFree", "memory");
    c.def(
        "allocator",
        [](const Library& self) {
            auto [allocate, release] = allocator_of(self).functions();
            return std::pair(reinterpret_cast<uintptr_t>(allocate), reinterpret_cast<uintptr_t>(release));
        },
        nb::sig("def allocator(self) -> tuple[int, int]"),
        "Addresses of two functions for torch's pluggable allocator.");
    c.def(
        "block_of",
        [](const Library& self, uintptr_t address) {
            if (self().MemAlloc == nullptr) return std::pair<uintptr_t, size_t>(0, 0);
            Block block = allocator_of(self).block_of(address);
            return std::pair(block.address, block.bytes);
        },
        nb::sig("def block_of(self, address: int, /) -> tuple[int, int]"),
        "(address, bytes) of the allocation in which the byte lies; zeros for none.");
    c.def(
        "bytes_in_use", [](const Library& self) { return allocator_of(self).bytes_in_use(); },
        nb::sig("def bytes_in_use(self) -> int"));
    c.def(
        "register",
        [](const Library& self, uintptr_t comm, uintptr_t memory, size_t bytes) {
            auto function = need(self().CommRegister, "CommRegister");
            void* handle = nullptr;
            GilReleased release;
            int result = function(comm_of(comm), as<void*>(memory), bytes, &handle);
            return created(result, handle);
        },
        nb::sig("def register(self, comm: int, memory: int, bytes: int, /) -> tuple[int, int]"));
    plain(c, "deregister", &Functions::CommDeregister, "CommDeregister", "comm handle");
    c.def(
        "window_register",
        [](const Library& self, uintptr_t comm, uintptr_t memory, size_t bytes, int flags, double seconds,
           const nb::callable& state) {
            auto function = need(self().CommWindowRegister, "CommWindowRegister");
            struct Nothing {};
            return create_within(
                seconds, std::make_unique<Creation<Nothing>>(),
                [&](auto& c) { return function(comm_of(comm), as<void*>(memory), bytes, &c.place, flags); },
                parent_state(state));
        },
        nb::sig("def window_register(self, comm: int, memory: int, bytes: int, flags: int, seconds: float, "
                "state: Callable[[], int], /) -> tuple[int, int]"),
        "`state()` returns the state of the communicator.");
    plain(c, "window_deregister", &Functions::CommWindowDeregister, "CommWindowDeregister", "comm window");
    c.def(
        "window_pointer",
        [](const Library& self, uintptr_t comm, uintptr_t window) {
            void* memory = nullptr;
            int result =
                need(self().WinGetUserPtr, "WinGetUserPtr")(comm_of(comm), as<Window>(window), &memory);
            return created(result, memory);
        },
        nb::sig("def window_pointer(self, comm: int, window: int, /) -> tuple[int, int]"));
    c.def(
        "premul_sum",
        [](const Library& self, const nb::bytes& scalar, int dtype, uintptr_t comm) {
            char factor[16] = {};
            if (scalar.size() > sizeof factor) throw nb::value_error("a factor has at most 16 bytes");
            std::memcpy(factor, scalar.c_str(), scalar.size());
            int op = 0;
            int result = need(self().RedOpCreatePreMulSum, "RedOpCreatePreMulSum")(&op, factor, dtype, 1,
                                                                                   comm_of(comm));
            return std::pair(result, op);
        },
        nb::sig("def premul_sum(self, scalar: bytes, dtype: int, comm: int, /) -> tuple[int, int]"),
        "`scalar`: the factor in the element type.");
    plain(c, "op_destroy", &Functions::RedOpDestroy, "RedOpDestroy", "op comm");
}

void bind_operations(nb::class_<Library>& c) {
    plain(c, "group_start", &Functions::GroupStart, "GroupStart", "");
    plain(c, "group_end", &Functions::GroupEnd, "GroupEnd", "");
    plain(c, "all_reduce", &Functions::AllReduce, "AllReduce", "send recv count dtype op comm stream");
    plain(c, "reduce", &Functions::Reduce, "Reduce", "send recv count dtype op root comm stream");
    plain(c, "broadcast", &Functions::Broadcast, "Broadcast", "send recv count dtype root comm stream");
    plain(c, "all_gather", &Functions::AllGather, "AllGather", "send recv count dtype comm stream");
    plain(c, "reduce_scatter", &Functions::ReduceScatter, "ReduceScatter",
          "send recv count dtype op comm stream");
    plain(c, "all_to_all", &Functions::AlltoAll, "AlltoAll", "send recv count dtype comm stream");
    plain(c, "gather", &Functions::Gather, "Gather", "send recv count dtype root comm stream");
    plain(c, "scatter", &Functions::Scatter, "Scatter", "send recv count dtype root comm stream");
    plain(c, "send", &Functions::Send, "Send", "buffer count dtype peer comm stream");
    plain(c, "recv", &Functions::Recv, "Recv", "buffer count dtype peer comm stream");
    plain(c, "put_signal", &Functions::PutSignal, "PutSignal",
          "source count dtype peer window offset signal context flags comm stream");
    plain(c, "signal", &Functions::Signal, "Signal", "peer signal context flags comm stream");
    c.def(
        "wait_signal",
        [](const Library& self, int count, int peer, int index, uintptr_t comm, uintptr_t stream) {
            auto function = need(self().WaitSignal, "WaitSignal");
            WaitSignalDesc wait{count, peer, index, 0};
            GilReleased release;
            return function(1, &wait, comm_of(comm), as<Stream>(stream));
        },
        nb::sig(
            "def wait_signal(self, count: int, peer: int, index: int, comm: int, stream: int, /) -> int"));
}

}  // namespace

void bind_nccl(nb::module_& m) {
    nb::class_<Library> c(m, "NcclLibrary",
                          "The C functions of NCCL or RCCL. Pointers are integers; each returns the "
                          "library's result, and what it creates.");
    c.def(nb::init<const std::string&, bool>(), nb::arg("path"), nb::arg("loaded_only") = false);
    c.def_prop_ro("version", &Library::version);
    c.def_prop_ro("file", &Library::file);
    c.def(
        "functions",
        [](const Library& self) {
            std::vector<std::tuple<std::string, int, bool>> list;
            for (const KnownFunction& k : self.known()) list.emplace_back(k.name, k.since, k.there);
            return list;
        },
        nb::sig("def functions(self) -> list[tuple[str, int, bool]]"),
        "(name, version that introduced it, whether this library has it) of each known function.");
    c.def(
        "error_string",
        [](const Library& self, int result) {
            const char* text = self().GetErrorString != nullptr ? self().GetErrorString(result) : nullptr;
            return std::string(text != nullptr ? text : "");
        },
        nb::sig("def error_string(self, result: int, /) -> str"));
    c.def(
        "last_error",
        [](const Library& self, uintptr_t comm) {
            const char* text = self().GetLastError != nullptr ? self().GetLastError(comm_of(comm)) : nullptr;
            return std::string(text != nullptr ? text : "");
        },
        nb::sig("def last_error(self, comm: int, /) -> str"));
    bind_life(c);
    bind_memory(c);
    bind_operations(c);
    m.def("nccl_config_fields", [] {
        std::vector<std::tuple<std::string, bool, int>> list;
        for (const Field& f : config_fields()) list.emplace_back(f.name, f.text, f.since);
        return list;
    });
    m.def("nccl_config_bytes", &config_bytes, nb::arg("version"));
}

}  // namespace unicomm
