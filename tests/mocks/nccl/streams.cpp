#include "streams.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "abi.hpp"

namespace mock_nccl {
namespace {

// As the CUDA runtime numbers them.
enum Status : int {
    kOk = 0,
    kInvalidValue = 1,
    kInvalidHandle = 400,
    kNotReady = 600,
    kCaptureUnsupported = 900,
    kCaptureInvalidated = 901,
    kCaptureUnjoined = 904,
    kCaptureIsolation = 905,
    kCapturedEvent = 907,
};

constexpr std::chrono::seconds kIdle{2};

struct Event {
    bool timing;
    std::shared_ptr<Mark> mark;  // of the last record
    // One that was recorded in a capture: which, and after how many nodes of which streams it comes.
    bool captured = false;
    std::weak_ptr<Capture> capture = {};  // what it holds ends with its graph
    std::map<Stream*, size_t> after = {};
};

// Never destroyed: threads may still run while the process ends.
struct Tables {
    std::mutex mutex;
    std::map<void*, std::shared_ptr<Stream>> streams;
    std::map<void*, Event> events;
    std::vector<std::shared_ptr<Capture>> captures;  // under way
    std::map<void*, std::shared_ptr<Capture>> graphs;
};
Tables& tables() {
    static Tables* t = new Tables;
    return *t;
}

// A handle is an address that is never used again, so that one which was destroyed is recognised.
void* new_handle() { return new char; }

struct DefaultStream {
    std::shared_ptr<Stream> stream = std::make_shared<Stream>();
    ~DefaultStream() { stream->release(); }
};
thread_local DefaultStream default_stream;
thread_local int device;
// What the runtime keeps for whoever asks for it; each error that is none of the program's has to be asked
// for.
thread_local int device_error;

std::shared_ptr<Mark> mark_of(void* event, bool* known) {
    std::lock_guard lock(tables().mutex);
    auto found = tables().events.find(event);
    *known = found != tables().events.end();
    return *known ? found->second.mark : nullptr;
}

// As in CUDA's global mode (and in any mode with HIP): who asks for an event, from whatever thread, or waits
// on the host, ends the captures that are under way. True when there were any.
bool ends_captures() {
    std::lock_guard lock(tables().mutex);
    for (auto& capture : tables().captures) capture->invalid = true;
    return !tables().captures.empty();
}

void join(std::map<Stream*, size_t>& into, const std::map<Stream*, size_t>& other) {
    for (auto& [stream, count] : other) into[stream] = std::max(into[stream], count);
}

int enqueue(void* handle, Stream::Task task) {
    auto stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    stream->enqueue(std::move(task));
    return kOk;
}

}  // namespace

void start_thread(std::function<void()> body) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(std::move(body)).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Mark::set() {
    std::lock_guard lock(mutex_);
    reached_ = true;
    when_ = std::chrono::steady_clock::now();
    changed_.notify_all();
}

void Mark::wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
}

bool Mark::reached() {
    std::lock_guard lock(mutex_);
    return reached_;
}

std::chrono::steady_clock::time_point Mark::when() {
    std::lock_guard lock(mutex_);
    return when_;
}

std::shared_ptr<Capture> Stream::capture() {
    std::lock_guard lock(mutex_);
    return capture_;
}

void Stream::set_capture(std::shared_ptr<Capture> capture) {
    std::lock_guard lock(mutex_);
    capture_ = std::move(capture);
}

void Stream::capture_node(Capture::Node node) {
    auto capture = this->capture();
    std::lock_guard lock(tables().mutex);
    capture->nodes.push_back(std::move(node));
    ++capture->after[this][this];
}

void Stream::enqueue(Task task) {
    if (capture())
        return capture_node([task](const std::shared_ptr<Stream>& stream) { stream->enqueue(task); });
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (!thread_) {
        thread_ = true;
        start_thread([self = shared_from_this()] { self->work(); });
    }
    changed_.notify_one();
}

void Stream::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        if (tasks_.empty() && !released_)
            changed_.wait_for(lock, kIdle, [&] { return !tasks_.empty() || released_; });
        if (tasks_.empty()) break;
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        busy_ = true;
        lock.unlock();
        task();
        task = nullptr;  // what it held goes before the stream counts as idle
        lock.lock();
        busy_ = false;
    }
    thread_ = false;
}

bool Stream::idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty() && !busy_;
}

void Stream::synchronize() {
    if (idle()) return;
    auto mark = std::make_shared<Mark>();
    enqueue([mark] { mark->set(); });
    mark->wait();
}

void Stream::release() {
    std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_one();
}

std::shared_ptr<Stream> find_stream(void* handle) {
    if (!handle) return default_stream.stream;
    std::lock_guard lock(tables().mutex);
    auto found = tables().streams.find(handle);
    return found == tables().streams.end() ? nullptr : found->second;
}

int current_device() { return device; }

bool (*is_library_memory)(const void* address) = nullptr;

}  // namespace mock_nccl

using namespace mock_nccl;

EXPORT int mock_set_device(int number) {
    if (number < 0) return kInvalidValue;
    device = number;
    return kOk;
}

EXPORT int mock_stream_create(void** stream) {
    if (!stream) return kInvalidValue;
    std::lock_guard lock(tables().mutex);
    *stream = new_handle();
    tables().streams[*stream] = std::make_shared<Stream>();
    return kOk;
}

// Returns at once; what is enqueued still runs.
EXPORT int mock_stream_destroy(void* handle) {
    auto stream = find_stream(handle);
    if (!handle || !stream) return kInvalidHandle;
    stream->release();
    std::lock_guard lock(tables().mutex);
    tables().streams.erase(handle);
    return kOk;
}

EXPORT int mock_stream_synchronize(void* handle) {
    auto stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    if (ends_captures()) return kCaptureUnsupported;
    stream->synchronize();
    return kOk;
}

EXPORT int mock_stream_query(void* handle) {
    auto stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    int result = stream->idle() ? kOk : kNotReady;
    if (result != kOk) device_error = result;
    return result;
}

EXPORT int mock_last_error() {
    int found = device_error;
    device_error = kOk;
    return found;
}

EXPORT int mock_stream_wait_event(void* handle, void* event) {
    bool known;
    auto mark = mark_of(event, &known);
    if (!known) return kInvalidHandle;
    auto stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    auto mine = stream->capture();
    {
        std::lock_guard lock(tables().mutex);
        Event& e = tables().events[event];
        auto its = e.capture.lock();
        if (e.captured || (mine && mark)) {
            // A stream becomes part of a capture by waiting for one of its events; what is in a capture
            // cannot wait for anything outside of it.
            if (!its || its->invalid || (mine && mine != its)) {
                if (mine) mine->invalid = true;
                return kCaptureIsolation;
            }
            if (!mine) {
                stream->set_capture(its);
                its->streams.push_back(stream);
            }
            join(its->after[stream.get()], e.after);
            return kOk;
        }
    }
    if (!mark) return kOk;  // never recorded: nothing to wait for
    return enqueue(handle, [mark] { mark->wait(); });
}

EXPORT int mock_stream_sleep(void* handle, double ms) {
    if (!(ms >= 0)) return kInvalidValue;
    return enqueue(handle,
                   [ms] { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms)); });
}

EXPORT int mock_stream_memset(void* handle, void* data, int value, size_t bytes) {
    if (!data && bytes) return kInvalidValue;
    return enqueue(handle, [=] { memset(data, value, bytes); });
}

EXPORT int mock_stream_memcpy(void* handle, void* to, const void* from, size_t bytes) {
    if ((!to || !from) && bytes) return kInvalidValue;
    return enqueue(handle, [=] { memmove(to, from, bytes); });
}

// With the arguments of cudaMemcpyAsync; 4 is "by the addresses". As there, a copy from a device's memory
// into that of the host, unless it is pinned, is done when the call returns.
EXPORT int mock_memcpy_async(void* to, const void* from, size_t bytes, int kind, void* handle) {
    int result = kind == 4 ? mock_stream_memcpy(handle, to, from, bytes) : kInvalidValue;
    if (result == kOk && is_library_memory && is_library_memory(from) && !is_library_memory(to)) {
        if (auto stream = find_stream(handle); !stream->capture()) stream->synchronize();
    }
    if (result != kOk) device_error = result;
    return result;
}

// The same where the default stream is the host: what it copies is there when it returns.
EXPORT int mock_memcpy_at_once(void* to, const void* from, size_t bytes, int kind, void* handle) {
    int result = mock_memcpy_async(to, from, bytes, kind, handle);
    return result == kOk && handle == nullptr ? mock_stream_synchronize(handle) : result;
}

EXPORT int mock_stream_host_function(void* handle, void (*function)(void*), void* argument) {
    if (!function) return kInvalidValue;
    return enqueue(handle, [=] { function(argument); });
}

EXPORT int mock_event_create(void** event, int timing) {
    if (!event) return kInvalidValue;
    std::lock_guard lock(tables().mutex);
    *event = new_handle();
    tables().events[*event] = Event{timing != 0, nullptr};
    return kOk;
}

EXPORT int mock_event_destroy(void* event) {
    std::lock_guard lock(tables().mutex);
    return tables().events.erase(event) ? kOk : kInvalidHandle;
}

EXPORT int mock_event_record(void* event, void* stream) {
    auto mark = std::make_shared<Mark>();
    auto target = find_stream(stream);
    if (!target) return kInvalidHandle;
    {
        std::lock_guard lock(tables().mutex);
        auto found = tables().events.find(event);
        if (found == tables().events.end()) return kInvalidHandle;
        found->second.mark = mark;
        auto capture = target->capture();
        found->second.captured = capture != nullptr;
        found->second.capture = capture;
        if (capture) {
            found->second.after = capture->after[target.get()];
            return kOk;
        }
    }
    target->enqueue([mark] { mark->set(); });
    return kOk;
}

EXPORT int mock_event_query(void* event) {
    bool known;
    auto mark = mark_of(event, &known);
    if (!known) return kInvalidHandle;
    if (ends_captures()) return kCaptureUnsupported;
    {
        std::lock_guard lock(tables().mutex);
        if (tables().events[event].captured) return kCapturedEvent;
    }
    return !mark || mark->reached() ? kOk : kNotReady;
}

EXPORT int mock_event_synchronize(void* event) {
    bool known;
    auto mark = mark_of(event, &known);
    if (!known) return kInvalidHandle;
    if (mark) mark->wait();
    return kOk;
}

EXPORT int mock_event_elapsed_ms(float* ms, void* start, void* end) {
    if (!ms) return kInvalidValue;
    std::shared_ptr<Mark> marks[2];
    for (int i = 0; i < 2; ++i) {
        std::lock_guard lock(tables().mutex);
        auto found = tables().events.find(i ? end : start);
        if (found == tables().events.end() || !found->second.timing || !found->second.mark)
            return kInvalidHandle;
        if (found->second.captured) return kCapturedEvent;
        marks[i] = found->second.mark;
    }
    if (!marks[0]->reached() || !marks[1]->reached()) return kNotReady;
    *ms = std::chrono::duration<float, std::milli>(marks[1]->when() - marks[0]->when()).count();
    return kOk;
}

EXPORT int mock_stream_begin_capture(void* handle) {
    auto stream = find_stream(handle);
    if (!handle || !stream) return kInvalidHandle;  // the default stream cannot be captured
    if (stream->capture()) return kCaptureUnsupported;
    auto capture = std::make_shared<Capture>();
    capture->origin = stream.get();
    capture->streams.push_back(stream);
    stream->set_capture(capture);
    std::lock_guard lock(tables().mutex);
    tables().captures.push_back(capture);
    return kOk;
}

EXPORT int mock_stream_is_capturing(void* handle, int* capturing) {
    auto stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    *capturing = stream->capture() != nullptr;
    return kOk;
}

// The capture is over in any case; without an error there is a graph.
EXPORT int mock_stream_end_capture(void* handle, void** graph) {
    auto stream = find_stream(handle);
    auto capture = stream ? stream->capture() : nullptr;
    if (!capture || capture->origin != stream.get() || !graph) return kInvalidValue;
    for (auto& part : capture->streams) part->set_capture(nullptr);
    std::lock_guard lock(tables().mutex);
    auto& open = tables().captures;
    open.erase(std::remove(open.begin(), open.end(), capture), open.end());
    *graph = nullptr;
    if (capture->invalid) return kCaptureInvalidated;
    for (auto& part : capture->streams) {
        size_t given = capture->after[part.get()][part.get()];
        if (capture->after[capture->origin][part.get()] < given) return kCaptureUnjoined;
    }
    *graph = new_handle();
    tables().graphs[*graph] = capture;
    return kOk;
}

EXPORT int mock_graph_launch(void* graph, void* handle) {
    auto stream = find_stream(handle);
    std::shared_ptr<Capture> found;
    {
        std::lock_guard lock(tables().mutex);
        auto entry = tables().graphs.find(graph);
        if (entry != tables().graphs.end()) found = entry->second;
    }
    if (!stream || !found) return kInvalidHandle;
    // One after the other, which no dependency among them forbids.
    for (auto& node : found->nodes) node(stream);
    return kOk;
}

EXPORT int mock_graph_destroy(void* graph) {
    std::shared_ptr<Capture> ended;  // what it holds goes when nothing is locked
    std::lock_guard lock(tables().mutex);
    auto found = tables().graphs.find(graph);
    if (found == tables().graphs.end()) return kInvalidHandle;
    ended = std::move(found->second);
    tables().graphs.erase(found);
    return kOk;
}
