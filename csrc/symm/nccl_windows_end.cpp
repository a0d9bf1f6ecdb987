#include "symm/nccl_windows_end.hpp"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>

namespace unicomm::symm::nccl_windows {
namespace {

constexpr int kWord = 4;         // ncclInt64
constexpr int kRemote = 6;       // ncclRemoteError
constexpr int kNotReady = 600;   // cudaErrorNotReady and hipErrorNotReady
constexpr int kCopyDefault = 4;  // cudaMemcpyDefault and hipMemcpyDefault: by the addresses

}  // namespace

uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

int report(FaultCode code, const std::string& detail, Error* error, const std::vector<int>& culprits) {
    error->n_culprits = int32_t(std::min(culprits.size(), std::size(error->culprits)));
    std::copy_n(culprits.begin(), error->n_culprits, error->culprits);
    size_t n = std::min(detail.size(), sizeof error->detail - 1);
    std::memcpy(error->detail, detail.data(), n);
    error->detail[n] = 0;
    return int(code);
}

int failed(const End& end, const char* what, int result, Error* error) {
    const auto& library = end.library();
    const char* words = library.GetLastError != nullptr ? library.GetLastError(end.comm) : nullptr;
    std::string detail = std::string("nccl") + what + ": " + library.GetErrorString(result);
    if (words != nullptr && *words != 0) detail += std::string(": ") + words;
    // A call on a communicator that has lost a rank says only that it is in error.
    int late = nccl::kSuccess;
    if (!end.over()) library.CommGetAsyncError(end.comm, &late);
    bool lost = result == kRemote || late == kRemote;
    return report(lost ? FaultCode::kPeerLost : FaultCode::kInternal, detail, error);
}

int checked(const End& end, nccl::Comm comm, const char* what, int result, Error* error) {
    while (result == nccl::kInProgress) {
        if (end.over()) return gone(error);
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        int asked = end.library().CommGetAsyncError(comm, &result);
        if (asked != nccl::kSuccess) result = asked;
    }
    return result == nccl::kSuccess ? 0 : failed(end, what, result, error);
}

int copied(const End& end, void* to, const void* from, uint64_t bytes, Stream stream, Error* error) {
    int result = bytes != 0 ? end.heap->device.copy(to, from, bytes, kCopyDefault, stream) : 0;
    if (result == 0) return 0;
    end.heap->device.last_error();  // it is not the program's
    return report(FaultCode::kInternal, "a copy failed with the device's error " + std::to_string(result),
                  error);
}

namespace {
// Until the stream has done what it has, which others have to come to as well.
int settled(const End& end, Stream stream, uint64_t deadline, Error* error) {
    auto nap = std::chrono::microseconds(20);
    for (int result; (result = end.heap->device.query(stream)) != 0;) {
        end.heap->device.last_error();  // "not yet" counts as one, which torch would find
        if (result != kNotReady)
            return report(FaultCode::kInternal, "the device's error " + std::to_string(result), error);
        if (end.over()) return gone(error);
        int late = nccl::kSuccess;
        if (end.library().CommGetAsyncError(end.comm, &late) == nccl::kSuccess && late != nccl::kSuccess &&
            late != nccl::kInProgress)
            return failed(end, "AllGather", late, error);
        if (now_ns() > deadline) return report(FaultCode::kTimeout, "the ranks did not meet", error);
        std::this_thread::sleep_for(nap);
        nap = std::min(2 * nap, std::chrono::microseconds(2000));
    }
    return 0;
}
}  // namespace

int meet(End& end, Meeting what, int64_t a, int64_t b, int64_t c, uint64_t deadline, Error* error) {
    if (end.over()) return gone(error);
    Heap& heap = *end.heap;
    char *mine = heap.base + kLine, *all = heap.base + 2 * kLine;
    heap.told = {what, a, b, c};
    uint64_t bytes = kWords * sizeof(int64_t);
    if (int code = copied(end, mine, heap.told.data(), bytes, nullptr, error)) return code;
    int result = end.library().AllGather(mine, all, kWords, kWord, end.comm, nullptr);
    if (int code = checked(end, end.comm, "AllGather", result, error)) return code;
    // A copy into memory like this lasts until the stream has come to it, however long that is.
    if (int code = settled(end, nullptr, deadline, error)) return code;
    if (int code = copied(end, heap.heard.data(), all, bytes * heap.heard.size() / kWords, nullptr, error))
        return code;
    return settled(end, nullptr, deadline, error);
}

int agree(End& end, Meeting what, int64_t a, int64_t b, uint64_t deadline, Error* error) {
    if (int code = meet(end, what, a, b, 0, deadline, error)) return code;
    std::map<std::vector<int64_t>, std::vector<int>> said;
    auto row = end.heap->heard.begin();
    for (int pe = 0; pe < end.heap->world; ++pe, row += kWords) said[{row, row + kWords}].push_back(pe);
    if (said.size() == 1) return 0;
    auto more = [](auto& x, auto& y) { return x.second.size() < y.second.size(); };
    auto most = std::max_element(said.begin(), said.end(), more);
    bool tie = 2 * most->second.size() <= size_t(end.heap->world);
    std::vector<int> culprits;
    for (const auto& [words, pes] : said)
        if (tie || pes != most->second) culprits.insert(culprits.end(), pes.begin(), pes.end());
    std::sort(culprits.begin(), culprits.end());
    return report(FaultCode::kMismatch, "the ranks allocate or free different memory", error, culprits);
}

}  // namespace unicomm::symm::nccl_windows
