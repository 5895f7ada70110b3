// Records the work of threads, and its times, for viewing in Perfetto (ui.perfetto.dev) or
// chrome://tracing.
//
// A TraceLog keeps the last events in memory of a fixed size; nothing is written before the end, by
// a TraceWriter, as Chrome's trace event JSON. Times are the steady clock's: files of processes on
// one host fit together (README.md says how to join them).
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace phub {

inline uint64_t trace_now_ns() {
  return static_cast<uint64_t>(
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

struct TraceEvent {
  enum class Kind : uint8_t {
    kSpan,         // nests in, or is apart from, the other spans of its thread
    kMoment,       // has no duration
    kOverlapping,  // a span that may overlap others: it gets a row of its own
  };
  static constexpr uint32_t kNone = ~uint32_t{0};

  const char* name = "";  // a literal
  uint64_t begin_ns = 0;
  uint64_t duration_ns = 0;
  uint64_t round = 0;
  uint32_t subject = kNone;  // a chunk's or a key's number
  uint32_t rank = kNone;
  uint32_t job = 0;
  uint16_t thread = 0;
  Kind kind = Kind::kSpan;
};

// One thread at a time. Adding allocates nothing.
class TraceLog {
 public:
  explicit TraceLog(size_t capacity);

  void add(const TraceEvent& event) {
    events_[added_ % events_.size()] = event;
    ++added_;
  }
  // Oldest first.
  void for_each(const std::function<void(const TraceEvent&)>& look) const;
  uint64_t forgotten() const { return added_ > events_.size() ? added_ - events_.size() : 0; }

 private:
  std::vector<TraceEvent> events_;
  uint64_t added_ = 0;
};

// A span of the calling thread, from here to the end of the scope. Without a log it costs a branch.
class TraceSpan {
 public:
  TraceSpan(TraceLog* log, const TraceEvent& event) : log_(log) {
    if (!log_) return;
    event_ = event;
    event_.begin_ns = trace_now_ns();
  }
  ~TraceSpan() {
    if (!log_) return;
    event_.duration_ns = trace_now_ns() - event_.begin_ns;
    log_->add(event_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  TraceLog* log_;
  TraceEvent event_;
};

// Texts for an event's numbers. Empty: the number has no meaning.
struct TraceNames {
  std::function<std::string(const TraceEvent&)> subject;
  std::function<std::string(const TraceEvent&)> job;
};

class TraceWriter {
 public:
  // Opens (and empties) the file, so that a wrong path is known at once. Throws Error(kInvalid).
  TraceWriter(std::string path, std::string process);

  void name_thread(uint16_t thread, std::string_view name);
  void write(const TraceLog& log, const TraceNames& names);
  // Throws Error(kFull) if something could not be written.
  void close();

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void put(const std::string& text);
  void begin_record();
  void write(const TraceEvent& event, const TraceNames& names);

  const std::string path_;
  const int pid_;
  std::unique_ptr<std::FILE, Closer> file_;
  uint64_t records_ = 0;
  uint64_t overlapping_ = 0;
  uint64_t forgotten_ = 0;
};

}  // namespace phub
