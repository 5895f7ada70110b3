// The device groups of phub.h, over worker/geeps/device_group.h.
#include <fmt/format.h>

#include <utility>

#include "worker/c_abi/call.h"
#include "worker/c_abi/geeps.h"
#include "worker/geeps/device_group.h"

namespace phub::c_abi {
namespace {

std::vector<geeps::TableSpec> tables_in(const phub_geeps_options* options) {
  const auto given = object_of<GeepsOptionsObject>(options);
  const std::lock_guard lock(given->mutex);
  return given->tables;
}

// `make_exchange()` returns what the members share.
template <typename MakeExchange>
phub_code create_group(const char* function, uint32_t members, int mean, uint32_t threads,
                       phub_device_group** group, MakeExchange make_exchange) {
  return call(function, [&] {
    constexpr uint32_t kMost = 1024;
    need(group, "group");
    check_may_wait();
    if (members == 0 || members > kMost || threads > kMost) {
      throw Refusal(PHUB_INVALID,
                    fmt::format("a group of {} devices with {} threads: it has 1 to {} devices, "
                                "and at most {} threads",
                                members, threads, kMost, kMost));
    }
    auto object = std::make_shared<DeviceGroupObject>();
    object->downstream = make_exchange();
    object->group = std::make_unique<geeps::DeviceGroup>(
        *object->downstream.exchange,
        geeps::DeviceGroupOptions{.members = members, .mean = mean != 0, .threads = threads});
    object->taken.resize(members);
    *group = handle_of<phub_device_group>(std::move(object), Type::kDeviceGroup);
  });
}

// Takes a member until the end of the scope; after keep(), for good.
class TakenMember {
 public:
  TakenMember(DeviceGroupObject& group, uint32_t member) : group_(group), member_(member) {
    const std::lock_guard lock(group.mutex);
    if (member >= group.taken.size()) {
      throw Refusal(PHUB_INVALID,
                    fmt::format("member {} of a group of {} devices", member, group.taken.size()));
    }
    if (group.taken[member]) {
      throw Refusal(PHUB_TAKEN, fmt::format("member {} of the group has, or had, a phub_geeps "
                                            "already",
                                            member));
    }
    group.taken[member] = true;
  }
  ~TakenMember() {
    if (kept_) return;
    const std::lock_guard lock(group_.mutex);
    group_.taken[member_] = false;
  }
  TakenMember(const TakenMember&) = delete;
  TakenMember& operator=(const TakenMember&) = delete;
  void keep() { kept_ = true; }

 private:
  DeviceGroupObject& group_;
  uint32_t member_;
  bool kept_ = false;
};

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_device_group_create(phub_worker* worker, const phub_geeps_options* tables,
                                   uint32_t members, int mean, uint32_t threads,
                                   phub_device_group** group) {
  return create_group(__func__, members, mean, threads, group,
                      [&] { return exchange_of(worker, tables_in(tables), Type::kDeviceGroup); });
}

phub_code phub_device_group_create_standalone(const phub_options* job, const float* initial,
                                              size_t elements, uint32_t members, int mean,
                                              uint32_t threads, phub_device_group** group) {
  return create_group(__func__, members, mean, threads, group,
                      [&] { return standalone_exchange(job, initial, elements); });
}

phub_code phub_device_group_destroy(phub_device_group* group) {
  return call(__func__, [&] {
    check_may_wait();
    Handles::instance().remove(group, Type::kDeviceGroup);
  });
}

phub_code phub_geeps_create_member(phub_device* device, phub_device_group* group, uint32_t member,
                                   const phub_geeps_options* options, phub_geeps** geeps) {
  std::shared_ptr<DeviceGroupObject> of;
  std::optional<TakenMember> taken;
  const phub_code code =
      create_geeps(__func__, device, options, geeps,
                   [&](GeepsObject& object, auto /*tables*/) -> geeps::Exchange& {
                     of = object_of<DeviceGroupObject>(group);
                     taken.emplace(*of, member);
                     object.group = of;
                     return of->group->member(member);
                   });
  if (code == PHUB_OK) taken->keep();
  return code;
}
