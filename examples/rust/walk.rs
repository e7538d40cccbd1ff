//! Random walkers in Rust: saves every 50 steps, and continues exactly where it was killed. See README.md.

mod nebula;

use nebula::{tensor, Session, FILES_ALL_RANKS};
use std::error::Error;

const FILE: &str = "walk.pt";

struct Walk {
    at: Vec<i64>,
    random: i64,
    step: i64,
}

impl Walk {
    fn advance(&mut self) {
        for place in &mut self.at {
            self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *place += if self.random < 0 { 1 } else { -1 };
        }
        self.step += 1;
    }

    fn save(&self, session: &Session) -> Result<(), nebula::Error> {
        let checkpoint = session.begin(&format!("step{}", self.step), FILES_ALL_RANKS)?;
        let (random, step) = ([self.random], [self.step]);
        checkpoint.save(FILE, &[tensor("at", &self.at, &[self.at.len() as u64])?, tensor("random", &random, &[1])?, tensor("step", &step, &[])?])?;
        checkpoint.commit()
    }

    fn resume(&mut self, session: &Session) -> Result<bool, nebula::Error> {
        let checkpoint = match session.latest()? {
            Some(found) => found,
            None => return Ok(false),
        };
        let map = checkpoint.map(FILE)?;
        let (mut random, mut step) = ([0], [0]);
        map.read("at", &mut self.at)?;
        map.read("random", &mut random)?;
        map.read("step", &mut step)?;
        (self.random, self.step) = (random[0], step[0]);
        Ok(true)
    }
}

extern "C" {
    fn raise(signal: i32) -> i32;
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: walk DIRECTORY [STEP IN WHICH IT KILLS ITSELF]")?;
    let crash_at = arguments.next().map_or(Ok(0), |text| text.parse())?;
    let session = Session::open(&path)?;
    let mut walk = Walk { at: vec![0; 1000], random: 1, step: 0 };
    let how = if walk.resume(&session)? { "resuming" } else { "starting" };
    println!("{how} from step {}", walk.step);
    while walk.step < 400 {
        walk.advance();
        if walk.step == crash_at {
            unsafe { raise(9) };
        }
        if walk.step % 50 == 0 {
            walk.save(&session)?;
        }
    }
    session.flush(60000)?;
    let sum = walk.at.iter().fold(0u64, |sum, place| sum.wrapping_mul(31).wrapping_add(*place as u64));
    println!("step {} checksum {sum}", walk.step);
    Ok(())
}
