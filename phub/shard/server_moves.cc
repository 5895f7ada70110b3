#include "phub/shard/server_moves.h"

#include <algorithm>
#include <utility>

namespace phub {

void ServerMoves::begin(const CopyPlace& what, bool to_server, SavedImage image, Done done) {
  if (image.bytes() == 0) return done(std::nullopt);
  moves_.push_back(
      {.place = what, .to_server = to_server, .image = std::move(image), .done = std::move(done)});
}

bool ServerMoves::drop(uint64_t state) {
  const auto move = std::ranges::find(moves_, state, [](const Move& m) { return m.place.state; });
  if (move == moves_.end()) return false;
  move->is_over = true;
  if (move->is_busy) return true;
  moves_.erase(move);
  return false;
}

void ServerMoves::drop_all() {
  std::erase_if(moves_, [](const Move& move) { return !move.is_busy; });
  for (Move& move : moves_) move.is_over = true, move.done = nullptr;
}

bool ServerMoves::is_busy() const {
  return std::ranges::any_of(moves_, [](const Move& move) { return move.is_busy; });
}

std::optional<ShardPiece> ServerMoves::next(bool of_state) {
  for (Move& move : moves_) {
    if (move.is_busy || of_state != (move.place.state > 0)) continue;
    move.is_busy = true;
    return ShardPiece{.place = move.place,
                      .to_server = move.to_server,
                      .bytes = move.image.piece(move.place.offset, kCopyPieceBytes)};
  }
  return std::nullopt;
}

void ServerMoves::moved(const ShardPiece& piece, const std::optional<Error>& failed) {
  const auto move = std::ranges::find_if(moves_, [&piece](const Move& each) {
    return each.is_busy && each.place.state == piece.place.state &&
           each.place.round == piece.place.round;
  });
  move->is_busy = false;
  if (!failed) move->place.offset += piece.bytes.size();
  if (!failed && !move->is_over && move->place.offset < move->image.bytes()) return;
  const Done done = std::move(move->done);
  moves_.erase(move);
  if (done) done(failed);
}

}  // namespace phub
