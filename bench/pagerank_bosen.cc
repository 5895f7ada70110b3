// PageRank over Debian's packages on petuum's Bösen (github.com/sailing-pmls/bosen), for
// bench/pagerank_peers: the loop of worker/examples/page_rank.cc, with a table of Bösen's, in
// lock-step (staleness 0). Every process is a server, too, at port PORT + 100 × its number. OUT
// gets each package's rank, as `pagerank --out` writes it.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iomanip>
#include <petuum_ps_common/include/petuum_ps.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "worker/examples/package_graph.h"

namespace {

constexpr double kDamping = 0.85;

using Row = petuum::DenseRow<double>;

struct Link {
  int from, to;
  double share, passed_on;
};

struct Options {
  std::string packages, out;
  int processes, process, threads, iterations, port;
};

std::vector<Link> links_of(const phub::examples::PackageGraph& graph) {
  std::vector<int> of_source(graph.names.size());
  for (const auto& link : graph.links) ++of_source[link.from];
  std::vector<Link> links;
  for (const auto& [from, to] : graph.links) {
    links.push_back({static_cast<int>(from), static_cast<int>(to), kDamping / of_source[from], 0});
  }
  return links;
}

petuum::TableGroupConfig group_of(const Options& options) {
  petuum::TableGroupConfig group;
  group.num_comm_channels_per_client = 1;
  group.num_total_clients = options.processes;
  group.num_tables = 1;
  group.num_local_app_threads = options.threads + 1;
  group.client_id = options.process;
  // SSPPush is faster, and comes to other ranks between processes.
  group.consistency_model = options.processes == 1 ? petuum::SSPPush : petuum::SSP;
  for (int i = 0; i < options.processes; ++i) {
    group.host_map[i] = petuum::HostInfo(i, "127.0.0.1", std::to_string(options.port + 100 * i));
  }
  return group;
}

petuum::ClientTableConfig table_of(size_t rows) {
  petuum::ClientTableConfig table;
  table.table_info.row_type = 0;
  table.table_info.table_staleness = 0;
  table.table_info.row_capacity = 1;
  table.table_info.row_oplog_type = petuum::RowOpLogType::kDenseRowOpLog;
  table.table_info.oplog_dense_serialized = true;
  table.table_info.dense_row_oplog_capacity = 1;
  table.process_cache_capacity = table.oplog_capacity = rows;
  table.process_storage_type = petuum::BoundedDense;
  return table;
}

void iterate(petuum::Table<double>& rows, std::vector<Link>& links) {
  for (Link& link : links) {
    petuum::RowAccessor accessor;
    const double rank = 1 - kDamping + rows.Get<Row>(link.from, &accessor)[0];
    rows.Inc(link.to, 0, link.share * (rank - link.passed_on));
    link.passed_on = rank;
  }
  petuum::PSTableGroup::Clock();
}

std::vector<double> ranks_of(const phub::examples::PackageGraph& graph,
                             petuum::Table<double>& rows) {
  std::vector<double> ranks;
  double sum = 0;
  for (size_t v = 0; v < graph.names.size(); ++v) {
    petuum::RowAccessor accessor;
    ranks.push_back(1 - kDamping + rows.Get<Row>(static_cast<int>(v), &accessor)[0]);
    sum += ranks.back();
  }
  for (double& rank : ranks) rank /= sum;
  return ranks;
}

void write(const std::string& path, const phub::examples::PackageGraph& graph,
           const std::vector<double>& ranks) {
  std::ofstream file(path);
  file << std::setprecision(17);
  for (size_t v = 0; v < ranks.size(); ++v) file << graph.names[v] << ' ' << ranks[v] << '\n';
  if (!file.flush()) throw std::runtime_error(path + ": cannot be written");
}

void run(const Options& options) {
  const phub::examples::PackageGraph graph = phub::examples::read_packages(options.packages);
  const std::vector<Link> links = links_of(graph);
  petuum::PSTableGroup::RegisterRow<Row>(0);
  petuum::PSTableGroup::Init(group_of(options), false);
  petuum::PSTableGroup::CreateTable(0, table_of(graph.names.size()));
  petuum::PSTableGroup::CreateTableDone();
  std::vector<double> ranks;
  std::vector<std::thread> threads;
  for (int t = 0; t < options.threads; ++t) {
    threads.emplace_back([&, t] {
      petuum::PSTableGroup::RegisterThread();
      auto rows = petuum::PSTableGroup::GetTableOrDie<double>(0);
      const size_t part = options.process * options.threads + t;
      const size_t parts = options.processes * options.threads, all = links.size();
      std::vector<Link> mine(links.begin() + all * part / parts,
                             links.begin() + all * (part + 1) / parts);
      for (int i = 0; i < options.iterations; ++i) iterate(rows, mine);
      petuum::PSTableGroup::GlobalBarrier();
      if (options.process == 0 && t == 0) ranks = ranks_of(graph, rows);
      petuum::PSTableGroup::GlobalBarrier();
      petuum::PSTableGroup::DeregisterThread();
    });
  }
  for (std::thread& thread : threads) thread.join();
  petuum::PSTableGroup::ShutDown();
  if (options.process == 0) write(options.out, graph, ranks);
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 8) {
    std::fprintf(stderr, "usage: %s PACKAGES PROCESSES PROCESS THREADS ITERATIONS PORT OUT\n",
                 argv[0]);
    return 2;
  }
  FLAGS_logtostderr = true;
  FLAGS_minloglevel = 1;
  google::InitGoogleLogging(argv[0]);
  run({.packages = argv[1],
       .out = argv[7],
       .processes = std::atoi(argv[2]),
       .process = std::atoi(argv[3]),
       .threads = std::atoi(argv[4]),
       .iterations = std::atoi(argv[5]),
       .port = std::atoi(argv[6])});
} catch (const std::exception& error) {
  std::fprintf(stderr, "pagerank_bosen: %s\n", error.what());
  return 1;
}
