// Bindings of UCX's library and worker.
#include "base/bind.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>

#include "base/clock.hpp"
#include "transport/bound.hpp"
#include "ucx/sockets.hpp"
#include "ucx/worker.hpp"

namespace unicomm {
namespace {

using namespace ucx;
using transport::Bound;
using transport::Ended;

struct UcxWorker final : Bound {
    explicit UcxWorker(const std::shared_ptr<Worker>& made) : Bound(made), worker(made) {}
    std::shared_ptr<Worker> worker;
};

}  // namespace

void bind_ucx(nb::module_& m) {
    nb::class_<Library>(m, "UcxLibrary", "An opened libucp.")
        .def(nb::init<const std::string&, bool>(), nb::arg("path"), nb::arg("loaded_only"),
             "Opens the library; raises OSError if it is none, or too old.")
        .def_prop_ro(
            "version",
            [](Library& l) { return std::make_tuple(l.version() / 100, l.version() % 100, l.release()); })
        .def_prop_ro("file", &Library::file)
        .def(
            "functions",
            [](const Library& l) {
                std::vector<std::tuple<std::string, int, bool>> found;
                for (const KnownFunction& k : l.known()) found.emplace_back(k.name, k.since, k.there);
                return found;
            },
            "Each function that may be used: name, since which version, whether the library has it.")
        .def(
            "set_log_level",
            [](Library& l, const std::string& level) {
                return l().ucs_global_opts_set_value("LOG_LEVEL", level.c_str()) == kOk;
            },
            nb::arg("level"),
            "Sets the level of UCX's own log, of this process. Returns False if it is none.");
    m.def(
        "end_full_sockets",
        [](int epoll, double seconds) { return end_full_sockets(epoll, deadline_after(seconds)); },
        nb::arg("epoll"), nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>(),
        "Ends the sending side of the TCP sockets below an epoll file whose buffers stay full. Returns how "
        "many.");
    nb::class_<UcxWorker, Bound>(m, "UcxWorker", "One communicator's worker of UCX.")
        .def(
            "__init__",
            [](UcxWorker* self, std::shared_ptr<Library> library, int rank, int size,
               const Worker::Settings& settings, double spin) {
                new (self) UcxWorker(
                    std::make_shared<Worker>(std::move(library), rank, size, settings, uint64_t(spin * 1e9)));
            },
            nb::arg("library"), nb::arg("rank"), nb::arg("size"), nb::arg("settings"), nb::arg("spin"),
            nb::call_guard<nb::gil_scoped_release>(),
            "`settings`: names without UCX_, values, and whether this UCX has to have them. `spin`: seconds "
            "that a wait polls before it sleeps.")
        .def_prop_ro(
            "address",
            [](UcxWorker& w) { return nb::bytes(w.worker->address().data(), w.worker->address().size()); })
        .def(
            "connect",
            [](UcxWorker& w, const std::vector<nb::bytes>& addresses) {
                std::vector<std::string> all;
                for (const nb::bytes& a : addresses) all.emplace_back(a.c_str(), a.size());
                GilReleased released;
                w.worker->connect(all);
            },
            nb::arg("addresses"), "Makes the endpoints to all workers, by the ranks' addresses.")
        .def(
            "greet",
            [](UcxWorker& w, double seconds) {
                Ended ended;
                {
                    GilReleased released;
                    ended = greet(*w.worker, deadline_after(seconds));
                }
                if (ended == Ended::kSignal) settle(*w.worker, ended);
                return ended == Ended::kDone;
            },
            nb::arg("seconds"), "Exchanges a message with every rank. Returns False when one did not come.")
        .def(
            "transports", [](UcxWorker& w, int peer) { return w.worker->transports(peer); }, nb::arg("peer"),
            "The ways to a peer, as transport/device; [] if this UCX does not tell.");
}

}  // namespace unicomm
