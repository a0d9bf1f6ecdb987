// The library's functions for Python, with pointers as whole numbers. Each returns the library's result, with
// what it makes after it; nothing is checked here. All run without the interpreter's lock.
#include "core/bind.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <type_traits>

#include "nccl/allocator.hpp"
#include "nccl/config.hpp"
#include "nccl/ending.hpp"
#include "nccl/library.hpp"
#include "nccl/making.hpp"

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

// A function that takes nothing but numbers and addresses.
template <class... A>
void plain(nb::class_<Library>& c, const char* name, int (*Functions::*member)(A...), const char* symbol) {
    c.def(name, [member, symbol](const Library& self, Plain<A>... args) {
        auto function = need(self().*member, symbol);
        GilReleased release;
        return function(as<A>(args)...);
    });
}

// One that writes one value through its last pointer.
template <class R, class... A>
auto out(const Library& self, int (*Functions::*member)(A...), const char* symbol, auto... before) {
    auto function = need(self().*member, symbol);
    R value{};
    GilReleased release;
    int result = function(before..., &value);
    return std::pair(result, value);
}

UniqueId read_id(const nb::bytes& bytes) {
    if (bytes.size() != sizeof(UniqueId)) throw nb::value_error("a unique id has 128 bytes");
    UniqueId id;
    std::memcpy(&id, bytes.c_str(), sizeof id);
    return id;
}

nb::bytes write_id(const UniqueId& id) { return nb::bytes(id.bytes, sizeof id.bytes); }

using Settings = std::vector<Setting>;
using Made = std::pair<int, uintptr_t>;

Made made(int result, void* what) { return {result, reinterpret_cast<uintptr_t>(what)}; }
Comm comm_of(uintptr_t comm) { return reinterpret_cast<Comm>(comm); }

template <class Call>
Made made_by(const Library& self, uintptr_t parent, double seconds, Call call) {
    auto [result, what] = made_of(self(), comm_of(parent), seconds, call);
    return made(result, what);
}

void bind_life(nb::class_<Library>& c) {
    c.def("unique_id", [](const Library& self) {
        UniqueId id;
        int result = need(self().GetUniqueId, "GetUniqueId")(&id);
        return std::pair(result, write_id(id));
    });
    c.def("init", [](const Library& self, int size, const nb::bytes& id, int rank, const Settings& settings) {
        UniqueId read = read_id(id);
        Comm comm = nullptr;
        auto configured = self().CommInitRankConfig;
        auto bare = need(self().CommInitRank, "CommInitRank");
        FilledConfig config(self.version(), settings);
        GilReleased release;
        int result = configured != nullptr ? configured(&comm, size, read, rank, config.get())
                                           : bare(&comm, size, read, rank);
        return made(result, comm);
    });
    c.def("init_scalable", [](const Library& self, int size, int rank, const std::vector<nb::bytes>& ids,
                              const Settings& settings) {
        auto function = need(self().CommInitRankScalable, "CommInitRankScalable");
        std::vector<UniqueId> read;
        for (const nb::bytes& id : ids) read.push_back(read_id(id));
        FilledConfig config(self.version(), settings);
        Comm comm = nullptr;
        GilReleased release;
        int result = function(&comm, size, rank, static_cast<int>(read.size()), read.data(), config.get());
        return made(result, comm);
    });
    c.def("split", [](const Library& self, uintptr_t parent, int color, int key, const Settings& settings,
                      double seconds) {
        auto function = need(self().CommSplit, "CommSplit");
        FilledConfig config(self.version(), settings);
        GilReleased release;
        return made_by(self, parent, seconds, [&](Comm* place) {
            return function(comm_of(parent), color, key, place, config.get());
        });
    });
    c.def("shrink", [](const Library& self, uintptr_t parent, std::vector<int> without,
                       const Settings& settings, bool abort, double seconds) {
        auto function = need(self().CommShrink, "CommShrink");
        FilledConfig config(self.version(), settings);
        GilReleased release;
        return made_by(self, parent, seconds, [&](Comm* place) {
            return function(comm_of(parent), without.data(), static_cast<int>(without.size()), place,
                            config.get(), abort ? 1 : 0);
        });
    });
    // A member has a parent, and an id if it is the one that got it; a newcomer has parent 0 and that id.
    c.def("grow", [](const Library& self, uintptr_t parent, int size, const nb::bytes& id, int rank,
                     const Settings& settings, double seconds) {
        auto function = need(self().CommGrow, "CommGrow");
        UniqueId read{};
        bool has_id = id.size() != 0;
        if (has_id) read = read_id(id);
        FilledConfig config(self.version(), settings);
        GilReleased release;
        if (parent == 0) {  // as a new one: complete or not, it is there when the call returns
            Comm comm = nullptr;
            int result = function(nullptr, size, &read, rank, &comm, config.get());
            return made(result, comm);
        }
        return made_by(self, parent, seconds, [&](Comm* place) {
            return function(comm_of(parent), size, has_id ? &read : nullptr, rank, place, config.get());
        });
    });
    c.def("comm_unique_id", [](const Library& self, uintptr_t comm) {
        UniqueId id{};
        int result = need(self().CommGetUniqueId, "CommGetUniqueId")(comm_of(comm), &id);
        return std::pair(result, write_id(id));
    });
    // These two return kInProgress when it takes longer; it goes on then.
    c.def("end", [](const Library& self, uintptr_t comm, double seconds) {
        need(self().CommDestroy, "CommDestroy");
        GilReleased release;
        return within(seconds, [functions = self(), comm] { return end_of_life(functions, comm_of(comm)); });
    });
    c.def("abort", [](const Library& self, uintptr_t comm, double seconds) {
        auto function = need(self().CommAbort, "CommAbort");
        GilReleased release;
        return within(seconds, [function, comm] { return function(comm_of(comm)); });
    });
    plain(c, "revoke", &Functions::CommRevoke, "CommRevoke");
    plain(c, "suspend", &Functions::CommSuspend, "CommSuspend");
    plain(c, "resume", &Functions::CommResume, "CommResume");
    c.def("async_error", [](const Library& self, uintptr_t comm) {
        return out<int>(self, &Functions::CommGetAsyncError, "CommGetAsyncError", comm_of(comm));
    });
    c.def("count", [](const Library& self, uintptr_t comm) {
        return out<int>(self, &Functions::CommCount, "CommCount", comm_of(comm));
    });
    c.def("user_rank", [](const Library& self, uintptr_t comm) {
        return out<int>(self, &Functions::CommUserRank, "CommUserRank", comm_of(comm));
    });
    c.def("device", [](const Library& self, uintptr_t comm) {
        return out<int>(self, &Functions::CommCuDevice, "CommCuDevice", comm_of(comm));
    });
    c.def("mem_stats", [](const Library& self, uintptr_t comm, int which) {
        return out<uint64_t>(self, &Functions::CommMemStats, "CommMemStats", comm_of(comm), which);
    });
}

Allocator allocator_of(const Library& self) {
    return Allocator::of(need(self().MemAlloc, "MemAlloc"), need(self().MemFree, "MemFree"));
}

void bind_memory(nb::class_<Library>& c) {
    c.def("mem_alloc", [](const Library& self, size_t bytes) {
        auto function = need(self().MemAlloc, "MemAlloc");
        void* memory = nullptr;
        GilReleased release;
        int result = function(&memory, bytes);
        return made(result, memory);
    });
    plain(c, "mem_free", &Functions::MemFree, "MemFree");
    // Addresses of two functions for torch.cuda's pluggable allocator.
    c.def("allocator", [](const Library& self) {
        auto [allocate, release] = allocator_of(self).functions();
        return std::pair(reinterpret_cast<uintptr_t>(allocate), reinterpret_cast<uintptr_t>(release));
    });
    // (address, bytes) of the allocation by these in which the byte lies; zeros for none.
    c.def("block_of", [](const Library& self, uintptr_t address) {
        if (self().MemAlloc == nullptr) return std::pair<uintptr_t, size_t>(0, 0);
        Block block = allocator_of(self).block_of(address);
        return std::pair(block.address, block.bytes);
    });
    c.def("bytes_in_use", [](const Library& self) { return allocator_of(self).bytes_in_use(); });
    c.def("register", [](const Library& self, uintptr_t comm, uintptr_t memory, size_t bytes) {
        auto function = need(self().CommRegister, "CommRegister");
        void* handle = nullptr;
        GilReleased release;
        int result = function(comm_of(comm), as<void*>(memory), bytes, &handle);
        return made(result, handle);
    });
    plain(c, "deregister", &Functions::CommDeregister, "CommDeregister");
    c.def("window_register",
          [](const Library& self, uintptr_t comm, uintptr_t memory, size_t bytes, int flags, double seconds) {
              auto function = need(self().CommWindowRegister, "CommWindowRegister");
              GilReleased release;
              return made_by(self, comm, seconds, [&](Window* place) {
                  return function(comm_of(comm), as<void*>(memory), bytes, place, flags);
              });
          });
    plain(c, "window_deregister", &Functions::CommWindowDeregister, "CommWindowDeregister");
    c.def("window_pointer", [](const Library& self, uintptr_t comm, uintptr_t window) {
        void* memory = nullptr;
        int result = need(self().WinGetUserPtr, "WinGetUserPtr")(comm_of(comm), as<Window>(window), &memory);
        return made(result, memory);
    });
    // `scalar`: the factor's bytes in the element type, in host memory, read before it returns.
    c.def("premul_sum", [](const Library& self, const nb::bytes& scalar, int dtype, uintptr_t comm) {
        char factor[16] = {};
        if (scalar.size() > sizeof factor) throw nb::value_error("a factor has at most 16 bytes");
        std::memcpy(factor, scalar.c_str(), scalar.size());
        int op = 0;
        int result =
            need(self().RedOpCreatePreMulSum, "RedOpCreatePreMulSum")(&op, factor, dtype, 1, comm_of(comm));
        return std::pair(result, op);
    });
    plain(c, "op_destroy", &Functions::RedOpDestroy, "RedOpDestroy");
}

void bind_operations(nb::class_<Library>& c) {
    plain(c, "group_start", &Functions::GroupStart, "GroupStart");
    plain(c, "group_end", &Functions::GroupEnd, "GroupEnd");
    plain(c, "all_reduce", &Functions::AllReduce, "AllReduce");
    plain(c, "reduce", &Functions::Reduce, "Reduce");
    plain(c, "broadcast", &Functions::Broadcast, "Broadcast");
    plain(c, "all_gather", &Functions::AllGather, "AllGather");
    plain(c, "reduce_scatter", &Functions::ReduceScatter, "ReduceScatter");
    plain(c, "all_to_all", &Functions::AlltoAll, "AlltoAll");
    plain(c, "gather", &Functions::Gather, "Gather");
    plain(c, "scatter", &Functions::Scatter, "Scatter");
    plain(c, "send", &Functions::Send, "Send");
    plain(c, "recv", &Functions::Recv, "Recv");
    plain(c, "put_signal", &Functions::PutSignal, "PutSignal");
    plain(c, "signal", &Functions::Signal, "Signal");
    c.def("wait_signal",
          [](const Library& self, int count, int peer, int index, uintptr_t comm, uintptr_t stream) {
              auto function = need(self().WaitSignal, "WaitSignal");
              WaitSignalDesc wait{count, peer, index, 0};
              GilReleased release;
              return function(1, &wait, comm_of(comm), as<Stream>(stream));
          });
}

}  // namespace

void bind_nccl(nb::module_& m) {
    nb::class_<Library> c(m, "NcclLibrary");
    c.def(nb::init<const std::string&, bool>(), nb::arg("path"), nb::arg("loaded_only") = false);
    c.def_prop_ro("version", &Library::version);
    c.def_prop_ro("file", &Library::file);
    c.def("functions", [](const Library& self) {
        std::vector<std::tuple<std::string, int, bool>> list;
        for (const Known& k : self.known()) list.emplace_back(k.name, k.since, k.there);
        return list;
    });
    c.def("error_string", [](const Library& self, int result) {
        const char* text = self().GetErrorString != nullptr ? self().GetErrorString(result) : nullptr;
        return std::string(text != nullptr ? text : "");
    });
    c.def("last_error", [](const Library& self, uintptr_t comm) {
        const char* text = self().GetLastError != nullptr ? self().GetLastError(comm_of(comm)) : nullptr;
        return std::string(text != nullptr ? text : "");
    });
    bind_life(c);
    bind_memory(c);
    bind_operations(c);
    m.def("nccl_config_fields", [] {
        std::vector<std::tuple<std::string, bool, int>> list;
        for (const Field& f : config_fields()) list.emplace_back(f.name, f.text, f.since);
        return list;
    });
    m.def("nccl_config_bytes", &config_bytes);
}

}  // namespace unicomm
