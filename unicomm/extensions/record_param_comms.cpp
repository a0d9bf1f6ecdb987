// Emits torch's own record of a communication, `record_param_comms`, which needs the ABI of the torch that
// is installed. Built on demand by `unicomm build torch-bridge`; without it nothing but this record is lost.

#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using Splits = std::vector<int64_t>;

// torch 2.11 does not record whether an operation is asynchronous, and has its number among the inputs only.
template <typename... Args>
std::shared_ptr<torch::ParamCommsDebugInfo> info_of(bool later, Args&&... args) {
    using Info = torch::ParamCommsDebugInfo;
    if constexpr (std::is_constructible_v<Info, Args..., bool>)
        return std::make_shared<Info>(std::forward<Args>(args)..., later);
    else
        return std::make_shared<Info>(std::forward<Args>(args)...);
}

template <typename Info>
void set_sequence(Info& info, int64_t seq, bool p2p) {
    if constexpr (requires { info.setSequenceInfo(seq, p2p); }) info.setSequenceInfo(seq, p2p);
}

class Record {
  public:
    Record(int64_t seq, bool p2p, std::string group, std::string desc, int rank, std::string op, int64_t ins,
           int64_t outs, at::ScalarType dtype, Splits in_splits, Splits out_splits, int first, int stride,
           int size, bool later)
        : info_(info_of(later, std::make_tuple(group, desc), rank, std::string(op), ins, outs, dtype,
                        in_splits, out_splits, first, stride, size)),
          inputs_{std::make_tuple(seq, p2p),
                  std::make_tuple(group, desc),
                  rank,
                  op,
                  in_splits,
                  out_splits,
                  first,
                  stride,
                  size} {
        set_sequence(*info_, seq, p2p);
    }

    // Both by the same thread, as torch keeps what it records by thread.
    void enter() {
        guard_.emplace(c10::DebugInfoKind::PARAM_COMMS_INFO, info_);
        function_.emplace(at::RecordScope::FUNCTION);
        if (function_->isActive()) function_->before("record_param_comms", &inputs_);
    }

    void leave() {
        function_.reset();
        guard_.reset();
    }

  private:
    std::shared_ptr<torch::ParamCommsDebugInfo> info_;
    std::vector<c10::IValue> inputs_;
    std::optional<c10::DebugInfoGuard> guard_;
    std::optional<at::RecordFunction> function_;
};

}  // namespace

PYBIND11_MODULE(unicomm_torch_bridge, m) {
    namespace py = pybind11;
    py::class_<Record>(m, "Record")
        .def(py::init<int64_t, bool, std::string, std::string, int, std::string, int64_t, int64_t,
                      at::ScalarType, Splits, Splits, int, int, int, bool>())
        .def("__enter__", &Record::enter)
        .def("__exit__", [](Record& self, const py::args&) { self.leave(); });
}
