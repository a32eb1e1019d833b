#include "media/dial_probe.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace holdfast {
namespace {

// Scatters numbers evenly: Knuth's multiplier.
std::uint64_t scattered(std::uint64_t number) { return number * 6364136223846793005U + 1442695040888963407U; }

}  // namespace

DialProbe::DialProbe(const std::string& directory, const std::string& name, std::uint64_t bytes, Kind kind,
                     const DialSpec& spec)
    : dial_(std::make_shared<Dial>(spec)), bytes_(bytes / piece_bytes * piece_bytes), buffer_(piece_bytes) {
  if (bytes_ == 0) throw Error(ErrorKind::config, "a probe needs 4 MiB at least");
  std::memset(buffer_.data(), 1, piece_bytes);
  if (kind == Kind::mapped) {
    medium_ = open_mapped_medium(directory);
    mapped_ = medium_->create(name, bytes_, Access::sequential);
    mapped_->allocate(0, bytes_);
    for (std::uint64_t from = 0; from < bytes_; from += piece_bytes) {
      std::memcpy(at(from), buffer_.data(), piece_bytes);
    }
    return;
  }
  const std::string path = directory + "/" + name;
  BlockFile::create(path, bytes_);
  blocks_ = std::make_unique<BlockFile>(path, Caching::direct);
  for (std::uint64_t from = 0; from < bytes_; from += piece_bytes) {
    blocks_->write(from, piece_bytes, buffer_.data());
  }
  blocks_->sync();
  blocks_->set_dial(dial_.get());
}

void DialProbe::read_all() {
  for (std::uint64_t from = 0; from < bytes_; from += piece_bytes) {
    if (blocks_) {
      queue_.read_range(*blocks_, from, piece_bytes, buffer_.data());
      continue;
    }
    DialService service(dial_.get(), {.stream_read_bytes = piece_bytes});
    std::memcpy(buffer_.data(), at(from), piece_bytes);
    service.finish();
  }
}

void DialProbe::write_all() {
  for (std::uint64_t from = 0; from < bytes_; from += piece_bytes) {
    if (blocks_) {
      queue_.write_range(*blocks_, from, piece_bytes, buffer_.data());
      continue;
    }
    DialService service(dial_.get(), {.stream_written_bytes = piece_bytes});
    std::memcpy(at(from), buffer_.data(), piece_bytes);
    service.finish();
  }
}

void DialProbe::sync() {
  if (blocks_) {
    blocks_->sync();
  } else {
    mapped_->sync();
  }
}

std::vector<std::uint64_t> DialProbe::places(std::uint64_t count, std::size_t bytes_each) const {
  std::vector<std::uint64_t> places(count);
  std::uint64_t number = 0;
  for (std::uint64_t& place : places) {
    number = scattered(number);
    place = (number >> 20) % (bytes_ / bytes_each) * bytes_each;
  }
  return places;
}

void DialProbe::read_at_random(std::uint64_t count, std::size_t bytes_each) {
  const std::size_t room = piece_bytes / bytes_each;
  const std::vector<std::uint64_t> from = places(count, bytes_each);
  if (blocks_) {
    std::vector<BlockRead> reads;
    for (std::size_t i = 0; i < count; ++i) {
      reads.push_back({blocks_.get(), from[i], bytes_each, buffer_.data() + i % room * bytes_each});
    }
    queue_.read_many(reads);
    return;
  }
  DialWork work;
  dial_->add_reads(work, count, bytes_each);
  DialService service(dial_.get(), work);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(buffer_.data() + i % room * bytes_each, at(from[i]), bytes_each);
  }
  service.finish();
}

void DialProbe::write_at_random(std::uint64_t count, std::size_t bytes_each) {
  const std::size_t room = piece_bytes / bytes_each;
  std::vector<std::uint64_t> to = places(count, bytes_each);
  if (blocks_) {
    std::ranges::sort(to);
    to.erase(std::unique(to.begin(), to.end()), to.end());
    std::vector<BlockWrite> writes;
    for (std::size_t i = 0; i < to.size(); ++i) {
      writes.push_back({blocks_.get(), to[i], bytes_each, buffer_.data() + i % room * bytes_each});
    }
    queue_.write_many(writes);
    return;
  }
  DialWork work;
  dial_->add_writes(work, count, bytes_each);
  DialService service(dial_.get(), work);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(at(to[i]), buffer_.data() + i % room * bytes_each, bytes_each);
  }
  service.finish();
}

void DialProbe::read_one_by_one(std::uint64_t count, std::size_t bytes_each) {
  DialWork one;
  dial_->add_reads(one, 1, bytes_each);
  for (const std::uint64_t place : places(count, bytes_each)) {
    if (blocks_) {
      const BlockRead read{blocks_.get(), place, bytes_each, buffer_.data()};
      queue_.read_many({&read, 1});
      continue;
    }
    DialService service(dial_.get(), one);
    std::memcpy(buffer_.data(), at(place), bytes_each);
    service.finish();
  }
}

}  // namespace holdfast
