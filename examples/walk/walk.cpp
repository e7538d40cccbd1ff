// Random walkers in C++: saves every SAVE_EVERY steps, and continues exactly where it was killed. See README.md.
#include <nebula.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr const char *FILE_NAME = "walk.pt";
constexpr std::int64_t SAVE_EVERY = 50;

// The handles of nebula.h, freed at the end of their scope.
template <auto free> struct freer {
        template <class T> void operator()(T *handle) const { free(handle); }
};
using session_ptr = std::unique_ptr<nebula_session, freer<nebula_session_close>>;
using checkpoint_ptr = std::unique_ptr<nebula_checkpoint, freer<nebula_checkpoint_free>>;
using map_ptr = std::unique_ptr<nebula_map, freer<nebula_map_free>>;

void check(nebula_status status, const nebula_error &error)
{
        if (status != NEBULA_OK)
                throw std::runtime_error(error.message);
}

struct walk {
        std::vector<std::int64_t> at;
        std::uint64_t random = 1;
        std::int64_t step = 0;

        nebula_tensor tensor(const char *name, nebula_dtype dtype, std::uint64_t count, const void *data) const
        {
                nebula_tensor made{};
                made.name = name, made.dtype = dtype, made.dim_count = 1, made.shape[0] = count, made.data = data;
                return made;
        }

        void move()
        {
                for (auto &place : at) {
                        random = random * 6364136223846793005u + 1442695040888963407u;
                        place += random >> 63 ? 1 : -1;
                }
                step++;
        }

        void save(nebula_session *session) const
        {
                const nebula_tensor tensors[] = {
                        tensor("at", NEBULA_DTYPE_I64, at.size(), at.data()),
                        tensor("random", NEBULA_DTYPE_I64, 1, &random),
                        tensor("step", NEBULA_DTYPE_I64, 1, &step),
                };
                nebula_checkpoint *begun = nullptr;
                nebula_error error{};

                check(nebula_checkpoint_begin(session, ("step" + std::to_string(step)).c_str(), 1, &begun, &error), error);
                const checkpoint_ptr checkpoint(begun);
                check(nebula_checkpoint_save_tensors(begun, FILE_NAME, tensors, 3, &error), error);
                check(nebula_checkpoint_commit(begun, &error), error);
        }

        void read(const nebula_map *map, const char *name, void *target, std::size_t size) const
        {
                nebula_tensor found{};
                nebula_error error{};

                check(nebula_map_tensor(map, name, &found, &error), error);
                if (found.dtype != NEBULA_DTYPE_I64 || found.shape[0] * sizeof(std::int64_t) != size)
                        throw std::runtime_error("the checkpoint is of another number of walkers");
                std::memcpy(target, found.data, size);
        }

        bool resume(nebula_session *session)
        {
                nebula_checkpoint *found = nullptr;
                nebula_map *mapped = nullptr;
                nebula_error error{};
                const auto status = nebula_checkpoint_latest(session, nullptr, &found, &error);

                if (status == NEBULA_NOT_FOUND)
                        return false;
                check(status, error);
                const checkpoint_ptr checkpoint(found);
                check(nebula_checkpoint_map(found, FILE_NAME, &mapped, &error), error);
                const map_ptr map(mapped);
                read(mapped, "at", at.data(), at.size() * sizeof at[0]);
                read(mapped, "random", &random, sizeof random);
                read(mapped, "step", &step, sizeof step);
                return true;
        }
};

} // namespace

int main(int argc, char **argv)
try {
        if (argc < 2 || argc > 3) {
                std::cerr << "usage: walk DIRECTORY [STEP IN WHICH IT KILLS ITSELF]\n";
                return 2;
        }
        const std::int64_t crash_at = argc > 2 ? std::stoll(argv[2]) : 0;
        nebula_options options;
        nebula_session *opened = nullptr;
        nebula_error error{};

        nebula_options_init(&options);
        options.persist_path = argv[1];
        check(nebula_session_open(&options, &opened, &error), error);
        const session_ptr session(opened);
        walk walkers{std::vector<std::int64_t>(1000)};
        std::cout << (walkers.resume(opened) ? "resuming from step " : "starting from step ") << walkers.step << std::endl;
        while (walkers.step < 400) {
                walkers.move();
                if (walkers.step == crash_at)
                        std::raise(SIGKILL);
                if (walkers.step % SAVE_EVERY == 0)
                        walkers.save(opened);
        }
        check(nebula_session_flush(opened, nullptr, 60000, &error), error);
        std::uint64_t sum = 0;
        for (const auto place : walkers.at)
                sum = sum * 31 + static_cast<std::uint64_t>(place);
        std::cout << "step " << walkers.step << " checksum " << sum << std::endl;
        return 0;
} catch (const std::exception &failure) {
        std::cerr << "walk: " << failure.what() << '\n';
        return 1;
}
