// Random walkers in C++: saves every SAVE_EVERY steps, and continues exactly where it was killed. See README.md.
#include <nebula.hpp>

#include <csignal>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr const char *FILE_NAME = "walk.pt";
constexpr std::int64_t SAVE_EVERY = 50;

struct walk {
        std::vector<std::int64_t> at;
        std::uint64_t random = 1;
        std::int64_t step = 0;

        void move()
        {
                for (auto &place : at) {
                        random = random * 6364136223846793005u + 1442695040888963407u;
                        place += random >> 63 ? 1 : -1;
                }
                step++;
        }

        void save(nebula::session &session) const
        {
                auto checkpoint = session.begin("step" + std::to_string(step));

                checkpoint.save(FILE_NAME, {nebula::tensor("at", at), nebula::tensor("random", &random, {1}),
                                            nebula::tensor("step", &step, {1})});
                checkpoint.commit();
        }

        bool resume(nebula::session &session)
        {
                const auto checkpoint = session.latest();

                if (!checkpoint)
                        return false;
                const auto map = checkpoint.map(FILE_NAME);
                map.read("at", at);
                map.read("random", &random, 1);
                map.read("step", &step, 1);
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
        nebula::session session(argv[1]);
        walk walkers{std::vector<std::int64_t>(1000)};
        std::cout << (walkers.resume(session) ? "resuming from step " : "starting from step ") << walkers.step << std::endl;
        while (walkers.step < 400) {
                walkers.move();
                if (walkers.step == crash_at)
                        std::raise(SIGKILL);
                if (walkers.step % SAVE_EVERY == 0)
                        walkers.save(session);
        }
        session.flush(60000);
        std::uint64_t sum = 0;
        for (const auto place : walkers.at)
                sum = sum * 31 + static_cast<std::uint64_t>(place);
        std::cout << "step " << walkers.step << " checksum " << sum << std::endl;
        return 0;
} catch (const std::exception &failure) {
        std::cerr << "walk: " << failure.what() << '\n';
        return 1;
}
