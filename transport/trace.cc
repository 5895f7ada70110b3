#include "transport/trace.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "transport/error.h"
#include "transport/fd.h"
#include "transport/text.h"

namespace phub {
namespace {

// Names of jobs and keys come from outside, and need not be UTF-8.
std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

double microseconds(uint64_t ns) { return static_cast<double>(ns) / 1000; }

std::string arguments(const TraceEvent& event, const TraceNames& names) {
  std::string text = fmt::format("\"round\":{}", event.round);
  if (event.rank != TraceEvent::kNone) text += fmt::format(",\"rank\":{}", event.rank);
  if (const std::string job = names.job ? names.job(event) : ""; !job.empty()) {
    text += fmt::format(",\"job\":{}", json_string(job));
  }
  if (event.subject == TraceEvent::kNone) return text;
  const std::string subject = names.subject ? names.subject(event) : "";
  return text + fmt::format(",\"of\":{}",
                            json_string(subject.empty() ? std::to_string(event.subject) : subject));
}

}  // namespace

TraceLog::TraceLog(size_t capacity) : events_(std::max<size_t>(capacity, 1)) {}

void TraceLog::for_each(const std::function<void(const TraceEvent&)>& look) const {
  for (uint64_t i = forgotten(); i < added_; ++i) look(events_[i % events_.size()]);
}

TraceWriter::TraceWriter(std::string path, std::string process)
    : path_(std::move(path)), pid_(getpid()), file_(std::fopen(path_.c_str(), "we")) {
  if (!file_) {
    fail(ErrorCode::kInvalid, "trace file '{}': {}", printable(path_), std::strerror(errno));
  }
  const FileSizeErrors no_signal;
  put("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[");
  begin_record();
  put(fmt::format(R"({{"name":"process_name","ph":"M","pid":{},"args":{{"name":{}}}}})", pid_,
                  json_string(process)));
}

// Failures show in close(). REQUIRES: a FileSizeErrors.
void TraceWriter::put(const std::string& text) { std::fputs(text.c_str(), file_.get()); }

void TraceWriter::begin_record() { put(records_++ == 0 ? "\n" : ",\n"); }

void TraceWriter::name_thread(uint16_t thread, std::string_view name) {
  const FileSizeErrors no_signal;
  begin_record();
  put(fmt::format(R"({{"name":"thread_name","ph":"M","pid":{},"tid":{},"args":{{"name":{}}}}})",
                  pid_, thread, json_string(name)));
}

void TraceWriter::write(const TraceLog& log, const TraceNames& names) {
  const FileSizeErrors no_signal;
  forgotten_ += log.forgotten();
  log.for_each([&](const TraceEvent& event) { write(event, names); });
}

void TraceWriter::write(const TraceEvent& event, const TraceNames& names) {
  const auto record = [&](char phase, uint64_t at_ns, const std::string& rest) {
    begin_record();
    put(fmt::format(R"({{"name":{},"cat":"phub","ph":"{}","ts":{:.3f},"pid":{},"tid":{}{}}})",
                    json_string(event.name), phase, microseconds(at_ns), pid_, event.thread, rest));
  };
  const std::string args = fmt::format(",\"args\":{{{}}}", arguments(event, names));
  switch (event.kind) {
    case TraceEvent::Kind::kSpan:
      record('X', event.begin_ns,
             fmt::format(",\"dur\":{:.3f}{}", microseconds(event.duration_ns), args));
      break;
    case TraceEvent::Kind::kMoment:
      record('i', event.begin_ns, fmt::format(",\"s\":\"t\"{}", args));
      break;
    case TraceEvent::Kind::kOverlapping: {
      const std::string id = fmt::format(",\"id\":\"{}-{}\"", pid_, overlapping_++);
      record('b', event.begin_ns, fmt::format("{}{}", id, args));
      record('e', event.begin_ns + event.duration_ns, id);
      break;
    }
  }
}

void TraceWriter::close() {
  if (!file_) return;
  const FileSizeErrors no_signal;
  put(fmt::format("\n],\"otherData\":{{\"events_forgotten\":{}}}}}\n", forgotten_));
  const bool written = std::fflush(file_.get()) == 0 && std::ferror(file_.get()) == 0;
  const int error = errno;
  file_.reset();
  if (!written) {
    fail(ErrorCode::kFull, "trace file '{}': {}", printable(path_), std::strerror(error));
  }
}

}  // namespace phub
