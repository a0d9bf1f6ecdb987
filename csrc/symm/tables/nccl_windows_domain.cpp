// Errors of the library, copies and meetings.
#include "symm/tables/nccl_windows_domain.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "base/clock.hpp"

namespace unicomm::symm::nccl_windows {
namespace {

constexpr int kWord = 4;         // ncclInt64
constexpr int kRemote = 6;       // ncclRemoteError
constexpr int kNotReady = 600;   // cudaErrorNotReady and hipErrorNotReady
constexpr int kCopyDefault = 4;  // cudaMemcpyDefault and hipMemcpyDefault: by the addresses

}  // namespace

int failed(const WindowDomain& self, const char* what, int result, Error* error) {
    const auto& library = self.library();
    const char* words = library.GetLastError != nullptr ? library.GetLastError(self.comm) : nullptr;
    std::string detail = std::string("nccl") + what + ": " + library.GetErrorString(result);
    if (words != nullptr && *words != 0) detail += std::string(": ") + words;
    // On a communicator that has lost a rank, a call only returns that the communicator is in error.
    int late = nccl::kSuccess;
    if (!self.over()) library.CommGetAsyncError(self.comm, &late);
    bool lost = result == kRemote || late == kRemote;
    return report(lost ? FaultCode::kPeerLost : FaultCode::kInternal, detail, error);
}

int checked(const WindowDomain& self, nccl::Comm comm, const char* what, int result, Error* error) {
    while (result == nccl::kInProgress) {
        if (self.over()) return gone(error);
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        int asked = self.library().CommGetAsyncError(comm, &result);
        if (asked != nccl::kSuccess) result = asked;
    }
    return result == nccl::kSuccess ? 0 : failed(self, what, result, error);
}

int copied(const WindowDomain& self, void* to, const void* from, uint64_t bytes, Stream stream,
           Error* error) {
    int result = bytes != 0 ? self.heap->device.copy(to, from, bytes, kCopyDefault, stream) : 0;
    if (result == 0) return 0;
    self.heap->device.last_error();  // so that the program does not find it
    return report(FaultCode::kInternal, "a copy failed with the device's error " + std::to_string(result),
                  error);
}

namespace {
// Waits until the stream has completed what the other PEs must reach as well.
int settled(const WindowDomain& self, Stream stream, uint64_t deadline, Error* error) {
    auto nap = std::chrono::microseconds(20);
    for (int result; (result = self.heap->device.query(stream)) != 0;) {
        self.heap->device.last_error();  // "not ready" counts as an error, which torch would find
        if (result != kNotReady)
            return report(FaultCode::kInternal, "the device's error " + std::to_string(result), error);
        if (self.over()) return gone(error);
        int late = nccl::kSuccess;
        if (self.library().CommGetAsyncError(self.comm, &late) == nccl::kSuccess && late != nccl::kSuccess &&
            late != nccl::kInProgress)
            return failed(self, "AllGather", late, error);
        if (now_ns() > deadline) return report(FaultCode::kTimeout, "the ranks did not meet", error);
        std::this_thread::sleep_for(nap);
        nap = std::min(2 * nap, std::chrono::microseconds(2000));
    }
    return 0;
}
}  // namespace

int meet(WindowDomain& self, Meeting what, int64_t a, int64_t b, int64_t c, uint64_t deadline, Error* error) {
    if (self.over()) return gone(error);
    Heap& heap = *self.heap;
    char *mine = heap.base + kLine, *all = heap.base + 2 * kLine;
    heap.told = {what, a, b, c};
    uint64_t bytes = kWords * sizeof(int64_t);
    if (int code = copied(self, mine, heap.told.data(), bytes, nullptr, error)) return code;
    int result = self.library().AllGather(mine, all, kWords, kWord, self.comm, nullptr);
    if (int code = checked(self, self.comm, "AllGather", result, error)) return code;
    // A copy into pageable memory blocks until the stream has reached it, however long that takes.
    if (int code = settled(self, nullptr, deadline, error)) return code;
    if (int code = copied(self, heap.heard.data(), all, bytes * heap.heard.size() / kWords, nullptr, error))
        return code;
    return settled(self, nullptr, deadline, error);
}

int agree(WindowDomain& self, Meeting what, int64_t a, int64_t b, uint64_t deadline, Error* error) {
    if (int code = meet(self, what, a, b, 0, deadline, error)) return code;
    std::map<std::vector<int64_t>, std::vector<int>> said;
    auto row = self.heap->heard.begin();
    for (int pe = 0; pe < self.heap->world; ++pe, row += kWords) said[{row, row + kWords}].push_back(pe);
    if (said.size() == 1) return 0;
    auto more = [](auto& x, auto& y) { return x.second.size() < y.second.size(); };
    auto most = std::max_element(said.begin(), said.end(), more);
    bool tie = 2 * most->second.size() <= size_t(self.heap->world);
    std::vector<int> culprits;
    for (const auto& [words, pes] : said)
        if (tie || pes != most->second) culprits.insert(culprits.end(), pes.begin(), pes.end());
    std::sort(culprits.begin(), culprits.end());
    return report(FaultCode::kMismatch, "the ranks allocate or free different memory", error, culprits);
}

}  // namespace unicomm::symm::nccl_windows
