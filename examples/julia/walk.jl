# Random walkers in Julia: saves every 50 steps, and continues exactly where it was killed. See README.md.
include("Nebula.jl")
using .Nebula

const FILE = "walk.pt"

function main(path, crash_at = 0)
    at, random, step = zeros(Int64, 1000), Int64[1], Int64[0]
    session = Session(path)
    found = latest(session)
    found === nothing || load!(found, FILE, "at" => at, "random" => random, "step" => step)
    println(found === nothing ? "starting" : "resuming", " from step ", step[1])
    while step[1] < 400
        for i in eachindex(at)
            random[1] = random[1] * 6364136223846793005 + 1442695040888963407
            at[i] += random[1] < 0 ? 1 : -1
        end
        step[1] += 1
        step[1] == crash_at && ccall(:raise, Cint, (Cint,), 9)
        if step[1] % 50 == 0
            checkpoint = begin_checkpoint(session, "step$(step[1])")
            save(checkpoint, FILE, "at" => at, "random" => random, "step" => step)
            commit(checkpoint)
        end
    end
    flush_all(session, 60000)
    println("step ", step[1], " checksum ", foldl((sum, place) -> sum * 31 + place, at; init = Int64(0)))
    close(session)
end

main(ARGS[1], parse.(Int, ARGS[2:end])...)
