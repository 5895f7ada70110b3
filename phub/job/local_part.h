// The part of a job in this box, which is a server or serves under one: the messages to its cores,
// and the memory and connections of its ranks. Control thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "phub/background.h"
#include "phub/core/mail.h"
#include "phub/job/job_part.h"
#include "phub/job/memory.h"
#include "phub/job/part.h"

namespace phub {

class LocalPart : public Part {
 public:
  // The memory into which a core of the part writes its answer to a probe.
  using ProbeOf = std::function<Probe&(uint32_t core)>;

  // `cores` are those of the machine, by core of the part. The budget counts the interest that
  // ranks declare, and what windows grow by. All of these outlive this, and the budget the job.
  LocalPart(JobPart& job, std::vector<uint32_t> cores, ProbeOf probe_of, CoreMail& mail,
            Background& builder, MemoryBudget& budget)
      : job_(job),
        cores_(std::move(cores)),
        probe_of_(std::move(probe_of)),
        mail_(mail),
        builder_(builder),
        budget_(budget),
        cores_left_(static_cast<uint32_t>(cores_.size())) {
    job_.windows().limit = &budget_;
  }

  void start() override;
  void admit(uint32_t rank, uint32_t incarnation, std::span<const KeyInterest> interest,
             Offer& offer, Done done) override;
  void reconnect(uint32_t rank, uint32_t incarnation, Offer& offer, Done done) override;
  void revoke(uint32_t rank) override;
  void hold() override { tell({.type = CoreMessage::kHold}); }
  void commit(const Commit& commit) override;
  void detach(uint32_t rank) override { tell({.type = CoreMessage::kDetach, .rank = rank}); }
  void attach(uint32_t rank, uint32_t incarnation) override {
    tell({.type = CoreMessage::kAttach, .rank = rank, .incarnation = incarnation});
  }
  void probe(uint64_t begun) override;
  bool wants_probe(uint64_t begun) override;
  void remove() override;
  bool gone() const override { return (!started_ || cores_left_ == 0) && tasks_ == 0; }

  bool has(uint32_t rank) const { return seats_.contains(rank); }  // admitted, and not revoked
  uint64_t interest_bytes() const { return interest_bytes_; }      // all ranks', in the budget
  void core_has_let_go() { --cores_left_; }                        // a core said kRemoved
  // Revokes all ranks, and closes the link. REQUIRES: gone().
  void close();
  // The server ends: detaches all ranks in place of the cores, whose threads have ended.
  void detach_all();

 private:
  using Chunks = std::vector<ChunkInterest>;  // empty: everything; the cores read them

  void tell(CoreMessage message);
  void open(uint32_t rank, uint32_t incarnation, Chunks chunks, Offer& offer);

  JobPart& job_;
  const std::vector<uint32_t> cores_;
  const ProbeOf probe_of_;
  CoreMail& mail_;
  Background& builder_;
  MemoryBudget& budget_;
  std::map<uint32_t, Chunks> seats_;  // by rank that the link has
  uint64_t interest_bytes_ = 0;
  uint64_t activity_ = 0;  // sum over all cores, at the last look
  uint32_t cores_left_;    // cores that have the job
  uint32_t tasks_ = 0;     // under way on other threads
  bool started_ = false, ending_ = false;
};

}  // namespace phub
