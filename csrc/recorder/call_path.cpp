// Finds the call path, and chooses the frames that are kept.
#include "recorder/call_path.hpp"

#include <algorithm>
#include <utility>

namespace unicomm {
namespace {

// Programs that compile code as they run make new call stacks without end. The paths in the ring stay: the
// same file, line and function are the same frame.
constexpr size_t kMostKnown = 4096;
// A function that calls itself appears twice in a path, which bounds the number of paths of a recursion.
constexpr int kMostOfFunction = 2;

Libraries libraries;

// A text that a code holds, so it lives as long as the code.
std::string_view text_of(PyObject* code, const char* name) {
    PyObject* text = PyObject_GetAttrString(code, name);
    Py_ssize_t n = 0;
    const char* s = text ? PyUnicode_AsUTF8AndSize(text, &n) : nullptr;
    Py_XDECREF(text);
    if (!s) {
        PyErr_Clear();
        return "?";
    }
    return {s, static_cast<size_t>(n)};
}

std::string_view file_of(PyObject* code) { return text_of(code, "co_filename"); }

std::string_view function_of(PyObject* code) {
#if PY_VERSION_HEX >= 0x030B0000
    return text_of(code, "co_qualname");
#else
    return text_of(code, "co_name");
#endif
}

enum class Kind : uint8_t { kUser, kWrapper, kTorch, kHidden };

struct Owner {
    Kind kind;
    std::string_view wrapper;  // its name, of kWrapper
};

bool below(std::string_view file, const std::string& folder) {
    return !folder.empty() && file.starts_with(folder);
}

Owner owner_of(std::string_view file) {
    if (below(file, libraries.own)) return {Kind::kHidden, {}};
    if (file.starts_with("<frozen")) return {Kind::kHidden, {}};  // runpy and importlib
    // Code that torch writes while a program runs: graphs of torch.fx, kernels of inductor.
    if (file.starts_with("<eval_with_key>") || file.find("/torchinductor_") != file.npos)
        return {Kind::kTorch, {}};
    if (below(file, libraries.torch)) {
        std::string_view inside = file.substr(libraries.torch.size());
        for (const std::string& folder : libraries.torch_wrappers)
            if (inside.starts_with(folder)) return {Kind::kWrapper, folder};
        return {Kind::kTorch, {}};
    }
    for (std::string_view packages : {"/site-packages/", "/dist-packages/"}) {
        size_t at = file.rfind(packages);
        if (at == file.npos) continue;
        std::string_view inside = file.substr(at + packages.size());
        for (const std::string& package : libraries.wrappers)
            if (inside.starts_with(package)) return {Kind::kWrapper, package};
        return {Kind::kUser, {}};
    }
    return {below(file, libraries.stdlib) ? Kind::kHidden : Kind::kUser, {}};
}

ring::PathFrame frame_of(const Activation& call, ring::Whose whose) {
    return {file_of(call.code), function_of(call.code), static_cast<uint32_t>(line_of(call)), whose};
}

// The frames of a path while they are chosen, the innermost first.
class Chosen {
  public:
    void add_user(const Activation& call) {
        auto same = [&](const Activation& other) { return other.code == call.code; };
        if (std::count_if(users_.begin(), users_.end(), same) == kMostOfFunction) return;
        users_.push_back(call);
        put(call, ring::Whose::kUser);
        wrapper_ = {};
    }
    // Of a wrapper's calls in a row, the innermost and the outermost are kept: what it does, and what the
    // user called.
    void add_wrapper(const Activation& call, std::string_view wrapper) {
        if (text_of(call.code, "co_name") == "wrapper") return;  // a decorator, which tells nothing
        run_ = wrapper == wrapper_ ? run_ + 1 : 1;
        wrapper_ = wrapper;
        if (run_ > 2) frames_.pop_back();
        put(call, ring::Whose::kWrapper);
    }
    void add_torch(const Activation& call) { put(call, ring::Whose::kTorch); }
    bool full() const { return frames_.size() == ring::kMostPathFrames; }
    const std::vector<ring::PathFrame>& frames() const { return frames_; }

  private:
    void put(const Activation& call, ring::Whose whose) { frames_.push_back(frame_of(call, whose)); }

    std::vector<ring::PathFrame> frames_;
    std::vector<Activation> users_;
    std::string_view wrapper_;  // of the last frame
    int run_ = 0;
};

}  // namespace

void CallPaths::set_libraries(Libraries fresh) { libraries = std::move(fresh); }

uint32_t CallPaths::current() {
    CallStack stack;
    read_call_stack(stack);
    auto found = known_.find(stack.hash);
    if (found != known_.end()) {
        const std::vector<Activation>& calls = found->second.calls;
        if (std::equal(calls.begin(), calls.end(), stack.calls, stack.calls + stack.size))
            return found->second.frame;
    }
    return add(stack);
}

uint32_t CallPaths::add(const CallStack& stack) {
    Chosen chosen;
    const Activation* torch = nullptr;
    for (int i = 0; i < stack.size && !chosen.full(); ++i) {
        const Activation& call = stack.calls[i];
        Owner owner = owner_of(file_of(call.code));
        if (owner.kind == Kind::kUser) chosen.add_user(call);
        if (owner.kind == Kind::kWrapper) chosen.add_wrapper(call, owner.wrapper);
        if (owner.kind == Kind::kTorch && !torch) torch = &call;
    }
    // Threads of autograd run nothing but torch.
    if (chosen.frames().empty() && torch) chosen.add_torch(*torch);
    uint32_t frame = writer_.add_path(chosen.frames());
    if (known_.size() >= kMostKnown) forget();
    auto [place, fresh] = known_.try_emplace(stack.hash);
    if (fresh) {
        place->second = {{stack.calls, stack.calls + stack.size}, frame};
        for (const Activation& call : place->second.calls) Py_INCREF(call.code);
    }
    return frame;
}

void CallPaths::forget() {
    // The end of a code may run Python code that records an operation.
    std::unordered_map<uint64_t, Known> old = std::exchange(known_, {});
    for (auto& [hash, known] : old)
        for (const Activation& call : known.calls) Py_DECREF(call.code);
}

}  // namespace unicomm
