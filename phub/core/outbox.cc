#include "phub/core/outbox.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace phub {
namespace {

constexpr uint32_t kFlushAfter = 16;  // chunks whose results go out together while more is coming

}  // namespace

Outbox::Outbox(const JobParameters& parameters, const JobArrays& arrays, Endpoint& endpoint,
               ChunkTable& table, const CoreTrace& trace)
    : endpoint_(endpoint),
      table_(table),
      trace_(trace),
      result_format_(result_format(parameters)),
      box_elements_(parameters.differences ? parameters.differences->box_elements : 0),
      worker_elements_(parameters.differences ? parameters.differences->worker_elements : 0),
      result_stride_(arrays.result_stride),
      mirrors_(parameters.rules.mirrors),
      lanes_(table.queues()),
      place_(table.size()),
      chunk_(table.size()),
      verdict_(parameters.rules.gated ? Notice(table.queues(), table.max_ranks()) : Notice()) {
  std::iota(chunk_.begin(), chunk_.end(), 0);
  std::ranges::stable_sort(chunk_, [&table](uint32_t a, uint32_t b) {
    const bool same_queue = table[a].queue == table[b].queue;
    return same_queue ? table[a].priority > table[b].priority : table[a].queue < table[b].queue;
  });
  std::vector<uint32_t> chunks(lanes_.size());  // by queue: the chunks so far
  for (const uint32_t index : chunk_) place_[index] = chunks[table[index].queue]++;
  uint32_t first = 0;
  for (size_t queue = 0; queue < lanes_.size(); ++queue) {
    lanes_[queue].first_chunk = first;
    first += chunks[queue];
    owed_.resize(owed_.size() + table.max_ranks(), IndexSet(chunks[queue]));
  }
  if (table.shared_slots() != nullptr || mirrors_) {
    untold_.resize(table.max_ranks(), IndexSet(table.size()));
  }
}

// False: there is nothing that the rank should receive.
bool Outbox::write_of(uint32_t rank, uint32_t index, uint64_t completed, Write& write) const {
  const CoreChunk& chunk = table_[index];
  const uint32_t in_queue = table_.index_in_queue(index);
  if (chunk.round == 0) {
    write.imm = encode({in_queue, chunk.initial_parts - 1u, ImmKind::kInitial});
    return chunk.initial_parts > 0;
  }
  const uint64_t from = table_.rank(rank).results_from;
  if (completed == kNever || completed < from || from == kNever) return false;
  // A rank that does not read the chunk is told that its contribution was taken, and so is the box
  // that this one stands by for; an idle rank, that it takes part.
  const bool idle = table_.is_idle(rank, index);
  if (idle || mirrors_ || !table_.reads(rank, index)) {
    write.imm = encode({in_queue, low8(idle ? from : completed), ImmKind::kNull});
    return true;
  }
  // The first result comes whole: the rank has no view yet.
  const bool whole = !result_format_.difference || completed == from;
  const auto place = [&](uint64_t all, uint64_t offset) {
    return whole ? result_place(result_format_, offset, chunk.elements)
                 : difference_place(result_format_, all, offset, chunk.elements);
  };
  if (completed > from && table_.is_same(rank, index)) {  // the rank has it
    write.imm = encode({in_queue, low8(completed), ImmKind::kNull});
    return true;
  }
  const ResultPlace here = place(box_elements_, chunk.offset);
  write = {.local_offset = rank * result_stride_ + here.byte,
           .remote_offset = place(worker_elements_, chunk.worker_offset).byte,
           .bytes = here.bytes,
           .imm = encode({in_queue, low8(completed), ImmKind::kData})};
  return true;
}

// False: the queue has no room.
bool Outbox::post(uint32_t rank, uint32_t index, uint64_t completed, const Write& write) {
  const CoreChunk& chunk = table_[index];
  const QueuePair to{chunk.queue, rank};
  if (has_notice() && !tell(to, completed)) return false;
  if (!endpoint_.post(to, write)) return false;
  table_.counters()[chunk.queue].bytes_out += write.bytes;
  return true;
}

// Tells the rank what it is to know before this result; the verdict on the result's round, if the
// rank was to take part in that. Returns false if the queue has no room.
bool Outbox::tell(QueuePair to, uint64_t completed) {
  if (!beginning_.tell(endpoint_, to)) return false;
  const bool of_round =
      verdict_.number() == completed && completed >= table_.rank(to.rank).first_round;
  return !of_round || verdict_.tell(endpoint_, to);
}

void Outbox::announce(const RoundVerdict& verdict) {
  std::array<uint32_t, kVerdictParts> imms;
  for (uint32_t part = 0; part < kVerdictParts; ++part) imms[part] = verdict_imm(verdict, part);
  verdict_.set(verdict.round, imms);
}

void Outbox::announce(const SwitchBeginning& beginning) {
  if (beginning.index == 0) return beginning_.withdraw();
  beginning_.set(beginning.index, std::array{beginning_imm(beginning)});
}

void Outbox::attached(uint32_t rank) {
  forget(rank);
  verdict_.attached(rank);
}

bool Outbox::post_taken(uint32_t rank, uint32_t index, uint64_t round) {
  const Imm imm{table_.index_in_queue(index), low8(round), ImmKind::kInitial};
  return endpoint_.post({table_[index].queue, rank}, {.imm = encode(imm)});
}

void Outbox::tell_taken(uint32_t rank, uint32_t index, uint64_t round) {
  const CoreRank& to = table_.rank(rank);
  if (untold_.empty() || round == kNever || !to.attached || to.broken) return;
  if (!table_.is_heard(rank, index)) return;  // it is told when that gradient has come once more
  ++unflushed_;
  if (untold_[rank].empty() && post_taken(rank, index, round)) return;
  const size_t before = untold_[rank].size();
  untold_[rank].insert(index);
  untold_total_ += untold_[rank].size() - before;
}

void Outbox::clear_untold(uint32_t rank, uint32_t index) {
  const size_t before = untold_[rank].size();
  untold_[rank].erase(index);
  untold_total_ -= before - untold_[rank].size();
}

void Outbox::send(uint32_t rank, uint32_t index, uint64_t completed) {
  Write write;
  if (table_.rank(rank).broken || !table_.is_heard(rank, index)) return;
  if (!write_of(rank, index, completed, write)) return;
  if (untold_total_ > 0 && table_[index].round > 0) clear_untold(rank, index);
  const uint32_t queue = table_[index].queue;
  IndexSet& places = owed(queue, rank);
  if (places.empty() && post(rank, index, completed, write)) return;
  const size_t before = places.size();
  places.insert(place_[index]);
  count_owed(queue, before, places.size());
}

void Outbox::send_to_all(uint32_t index, uint64_t completed) {
  const TraceSpan span = trace_.span("write back", table_[index]);
  for (uint32_t rank = 0; rank < table_.attached_end; ++rank) {
    const bool told = table_.is_idle(rank, index) && completed != table_.rank(rank).results_from;
    if (table_.rank(rank).attached && !told) send(rank, index, completed);
  }
}

void Outbox::forget(uint32_t rank) {
  for (uint32_t queue = 0; queue < lanes_.size(); ++queue) {
    IndexSet& places = owed(queue, rank);
    count_owed(queue, places.size(), 0);
    places.clear();
  }
  if (untold_.empty()) return;
  untold_total_ -= untold_[rank].size();
  untold_[rank].clear();
}

bool Outbox::flush_if_due(bool moved, size_t completed) {
  if (moved) unflushed_ += static_cast<uint32_t>(std::max<size_t>(completed, 1));
  if (unflushed_ == 0 || (moved && unflushed_ < kFlushAfter)) return false;
  unflushed_ = 0;
  const TraceSpan span = trace_.span("flush");
  endpoint_.flush();
  return true;
}

}  // namespace phub
