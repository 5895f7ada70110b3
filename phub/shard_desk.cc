#include "phub/shard_desk.h"

#include <fmt/format.h>

#include <optional>
#include <utility>
#include <vector>

#include "transport/error.h"

namespace phub {

void ShardDesk::join(ShardHello hello, Reply<ShardWelcome> reply) {
  if (!takes_boxes_) {
    fail(ErrorCode::kInvalid,
         "this server has a parent, and a rack is one box: start the other one as a rack of its "
         "own, or under the parent");
  }
  const std::string name = hello.name;
  const size_t cores_there = hello.cores.size();
  reply(host_.shards.join(std::move(hello), host_.time.now_ms()));
  host_.notes.add(
      host_.clock.now_ms(),
      fmt::format("the box '{}' serves under this server: {} cores", name, cores_there));
}

// A report may end a job and destroy it.
void ShardDesk::take_mail(uint64_t shard, ShardMail mail, Reply<ShardOrders> reply) {
  const std::vector<ShardReport> reports =
      host_.shards.mail(shard, std::move(mail), std::move(reply), host_.time.now_ms());
  for (const ShardReport& report : reports) {
    if (report.kind == ShardSays::kLeaves) {
      return lose(host_.shards.remove(shard), "it was ended");
    }
    const auto at = jobs_.spread().find(report.job);
    if (at == jobs_.spread().end()) continue;
    const std::shared_ptr<RunningJob> job = at->second;
    const std::optional<Error> nonsense = error_of([&] { job->handle(shard, report); });
    if (!nonsense) continue;
    return lose(host_.shards.remove(shard), nonsense->what());
  }
}

RemoteParts& ShardDesk::parts_of(uint64_t number) {
  const auto at = jobs_.spread().find(number);
  if (at == jobs_.spread().end()) {
    fail(ErrorCode::kNotFound, "there is no job of number {} that other boxes have a part of",
         number);
  }
  return at->second->remote();
}

void ShardDesk::read_copy(uint64_t shard, const CopyPlace& place, Reply<PartBytes> reply) {
  RemoteParts& remote = parts_of(place.job);
  reply(remote.moves().read(remote.box_of(shard), place));
  moved(shard, place);
}

void ShardDesk::check_copy(uint64_t shard, const CopyPlace& place, uint64_t bytes) {
  RemoteParts& remote = parts_of(place.job);
  remote.moves().check(remote.box_of(shard), place, bytes);
}

void ShardDesk::write_copy(uint64_t shard, const CopyPlace& place, std::string_view piece,
                           Reply<Done> reply) {
  RemoteParts& remote = parts_of(place.job);
  remote.moves().write(remote.box_of(shard), place, piece);
  moved(shard, place);
  reply(Done{});
}

void ShardDesk::tick(uint64_t now) {
  for (const ShardBox& lost : host_.shards.tick(now)) {
    lose(lost, fmt::format("no mail came for {} ms", host_.shards.lease_ms()));
  }
  lose_late(now);
  if (!awaited_.empty()) await_no_longer();
}

// A job may go by it, so one at a time; the next tick sees the next.
void ShardDesk::lose_late(uint64_t now) {
  for (const auto& [number, job] : jobs_.spread()) {
    const std::optional<RemoteParts::Late> late = job->late_shard(now);
    if (!late || !host_.shards.has(late->shard)) continue;
    const std::string name = job->job().spec().name;
    return lose(host_.shards.remove(late->shard), fmt::format("{} for job '{}'", late->what, name));
  }
}

// Boxes move one piece at a time, whichever job's it is.
void ShardDesk::moved(uint64_t shard, const CopyPlace& place) {
  if (!host_.shards.goes_on(shard, place)) return;
  for (const auto& [number, job] : jobs_.spread()) job->shard_moved(shard);
}

void ShardDesk::lose(const ShardBox& shard, const std::string& why) {
  host_.notes.add(host_.clock.now_ms(),
                  fmt::format("the box '{}' is lost: {}", shard.about.name, why));
  const Jobs::ByNumber jobs = jobs_.spread();
  for (const auto& [number, job] : jobs) {
    const size_t awaited = job->lose_shard(shard.id);
    if (awaited == 0) continue;
    const JobSpec& spec = job->job().spec();
    awaited_[spec.name] = {awaited, host_.clock.now_ms() + spec.wait_limit_ms};
  }
}

// The boxes are there, or the time is over.
void ShardDesk::await_no_longer() {
  const size_t there = host_.shards.boxes().size();
  const size_t gone = std::erase_if(awaited_, [&](const auto& awaited) {
    return there >= awaited.second.shards || host_.clock.now_ms() > awaited.second.until_ms;
  });
  if (gone == 0) return;
  retry_.happen();
}

}  // namespace phub
