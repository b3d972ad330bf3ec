// SPDX-License-Identifier: GPL-2.0-only
//! The language of vCPU programs: its steps, its parser and its rules.
//!
//! A program is a list of steps separated by `;`. What follows `loop:` is repeated for ever; a program without it runs
//! once and then halts for good, still answering IPIs. Amounts are numbers, or times such as `100us`.
//!
//! | step | what it does |
//! |---|---|
//! | `compute N` | N iterations of a register-only loop, or as many as take that time on the unloaded machine |
//! | `spin FLAG` | spins until the shared word FLAG is not zero |
//! | `spin FLAG round` | spins until FLAG is at least the number of this pass, counted from 1 |
//! | `pause N` | executes PAUSE N times |
//! | `set FLAG`, `clear FLAG`, `add FLAG` | FLAG becomes 1, 0, or one more |
//! | `lock [NAME]`, `unlock [NAME]` | takes, spinning, and gives a fair ticket lock |
//! | `barrier [NAME]` | spins until every vCPU whose program names this barrier has arrived |
//! | `sleeping-barrier VECTOR [NAME]` | halts until every vCPU whose program names this barrier has arrived; the last one wakes all others by an IPI |
//! | `ipi VCPU VECTOR` | sends an IPI through the x2APIC; the receiver's handler stamps, ends and answers it |
//! | `wait-answer` | spins until the last IPI sent was answered; its latency is counted |
//! | `shootdown VECTOR` | sends an IPI to all other vCPUs of the guest and spins until each has answered |
//! | `halt` | halts until an interrupt has arrived since the last `halt` or `sleep`, so none is missed |
//! | `timer N` | arms the vCPU's timer, in TSC ticks or as a time; when it fires, that is an interrupt |
//! | `sleep N` | arms the timer and halts until it has fired, whatever else arrives; how late it goes on is counted |
//! | `user`, `kernel` | the steps that follow run at CPL 3, or at CPL 0 again |
//! | `mask`, `unmask` | in between, no interrupt is handled: an IPI is answered after `unmask` |
//! | `stamp SLOT` | reads the TSC into slot 0 to 15 |
//!
//! Each wait is a loop of plain loads with one PAUSE per window, in the mode the vCPU is in. Interrupts are enabled
//! but between `mask` and `unmask`, where a vCPU neither halts nor changes its mode. The APIC, the timer, HLT and the mask
//! are privileged: their steps are an error in user mode.
//!
//! The answer to an IPI is the receiver's next interrupt of that vector. So vCPUs that send to the same receiver use
//! different vectors, or one may take the answer to another's IPI for its own. The vector of a `shootdown` is its sender's
//! alone.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::Quantity;
use crate::layout::{MAX_VCPUS, SHARED_NAME_BYTES, STAMPS};

/// Vectors that `ipi` may use: below are exceptions and the VMM's own, above are the timer and the spurious vector.
pub const IPI_VECTORS: Range<u8> = 0x30..0xec;

const LOOP: &str = "loop:";
const STEPS_HINT: &str = "compute, spin, pause, set, clear, add, lock, unlock, barrier, sleeping-barrier, ipi, \
                          wait-answer, shootdown, halt, timer, sleep, user, kernel, mask, unmask, stamp";

/// When `spin` ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The flag is not zero.
    NonZero,
    /// The flag is at least the number of the pass that the vCPU is in, counted from 1.
    Round,
}

/// One step; the table above says what each does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// `compute N`
    Compute(Quantity),
    /// `spin FLAG [round]`
    Spin {
        /// Name of the flag.
        flag: String,
        /// When it ends.
        until: Until,
    },
    /// `pause N`
    Pause(u64),
    /// `set FLAG`
    Set(String),
    /// `clear FLAG`
    Clear(String),
    /// `add FLAG`
    Add(String),
    /// `lock [NAME]`
    Lock(String),
    /// `unlock [NAME]`
    Unlock(String),
    /// `barrier [NAME]`
    Barrier(String),
    /// `sleeping-barrier VECTOR [NAME]`
    SleepingBarrier {
        /// Interrupt vector of the wake-up, within [`IPI_VECTORS`].
        vector: u8,
        /// Name of the barrier.
        name: String,
    },
    /// `ipi VCPU VECTOR`
    Ipi {
        /// Index of the receiving vCPU.
        vcpu: usize,
        /// Interrupt vector, within [`IPI_VECTORS`].
        vector: u8,
    },
    /// `wait-answer`
    WaitAnswer,
    /// `shootdown VECTOR`
    Shootdown(u8),
    /// `halt`
    Halt,
    /// `timer N`
    Timer(Quantity),
    /// `sleep N`
    Sleep(Quantity),
    /// `user`
    User,
    /// `kernel`
    Kernel,
    /// `mask`
    Mask,
    /// `unmask`
    Unmask,
    /// `stamp SLOT`
    Stamp(usize),
}

/// A program: steps that run once, then steps that repeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    steps: Vec<Step>,
    loop_start: Option<usize>,
}

impl Program {
    /// A program without steps: its vCPU halts at once and for good.
    pub fn idle() -> Self {
        Self::default()
    }

    /// All steps, those before the loop first.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Index of the first repeated step, if there is a loop.
    pub fn loop_start(&self) -> Option<usize> {
        self.loop_start
    }

    /// Whether the program has a `compute` step that is given as a time.
    pub fn needs_calibration(&self) -> bool {
        self.steps
            .iter()
            .any(|step| matches!(step, Step::Compute(amount) if amount.is_time()))
    }

    /// The largest vCPU index that the program sends an IPI to.
    pub fn highest_receiver(&self) -> Option<usize> {
        let receivers = self.steps.iter().filter_map(|step| match step {
            Step::Ipi { vcpu, .. } => Some(*vcpu),
            _ => None,
        });
        receivers.max()
    }
}

/// What is wrong with a program, and where. Displays the program with the place underlined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ParseError {
    text: String,
    span: Range<usize>,
    message: String,
}

impl ParseError {
    fn new(text: &str, span: Range<usize>, message: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            span,
            message: message.into(),
        }
    }

    /// What is wrong, without the place.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The bytes of the program that are at fault.
    pub fn span(&self) -> Range<usize> {
        self.span.clone()
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before = self.text[..self.span.start].chars().count();
        let under = self.text[self.span.clone()].chars().count().max(1);
        // A program from a file may have line breaks, which would separate the text from its underline.
        let line: String = self
            .text
            .chars()
            .map(|c| if c.is_whitespace() { ' ' } else { c })
            .collect();
        write!(
            f,
            "{}\n    {line}\n    {:before$}{}",
            self.message,
            "",
            "^".repeat(under)
        )
    }
}

/// A word and where it stands.
struct Word<'a> {
    text: &'a str,
    span: Range<usize>,
}

/// The words of one step, taken one by one.
struct Words<'a> {
    program: &'a str,
    name: Word<'a>,
    arguments: std::vec::IntoIter<Word<'a>>,
    span: Range<usize>,
}

impl FromStr for Program {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut program = Self::default();
        let mut rules = Rules::default();
        let mut at_loop = None;
        let mut last = 0..text.len();
        for part in parts(text) {
            let (part, starts_loop) = without_loop(text, part, &program)?;
            if starts_loop {
                program.loop_start = Some(program.steps.len());
                at_loop = Some(rules.clone());
            }
            let Some(mut words) = Words::of(text, part) else {
                continue;
            };
            let step = words.step()?;
            rules
                .allow(&step)
                .map_err(|message| ParseError::new(text, words.span.clone(), message))?;
            program.steps.push(step);
            last = words.span;
        }
        if program
            .loop_start
            .map_or(program.steps.is_empty(), |start| {
                start == program.steps.len()
            })
        {
            let message = "there is no step to run here; a vCPU that only halts is asked for with --idle-vcpus";
            return Err(ParseError::new(text, last, message));
        }
        if let Some(at_loop) = at_loop {
            rules
                .allow_repeating(&at_loop)
                .map_err(|message| ParseError::new(text, last, message))?;
        }
        Ok(program)
    }
}

/// The ranges between semicolons.
fn parts(text: &str) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    text.split(';').map(move |part| {
        let range = start..start + part.len();
        start = range.end + 1;
        range
    })
}

/// Takes `loop:` off the beginning of a part; whether it was there.
fn without_loop(
    text: &str,
    part: Range<usize>,
    program: &Program,
) -> Result<(Range<usize>, bool), ParseError> {
    let trimmed = text[part.clone()].trim_start();
    let start = part.end - trimmed.len();
    if !trimmed.starts_with(LOOP) {
        return Ok((start..part.end, false));
    }
    if program.loop_start.is_some() {
        let message =
            "a program has one `loop:` only; the steps after the first one repeat for ever";
        return Err(ParseError::new(text, start..start + LOOP.len(), message));
    }
    Ok((start + LOOP.len()..part.end, true))
}

impl<'a> Words<'a> {
    /// The words in `part` of `program`; none if it is blank.
    fn of(program: &'a str, part: Range<usize>) -> Option<Self> {
        let mut words: Vec<Word> = Vec::new();
        for text in program[part].split_whitespace() {
            let start = text.as_ptr() as usize - program.as_ptr() as usize;
            words.push(Word {
                text,
                span: start..start + text.len(),
            });
        }
        let span = words.first()?.span.start..words.last()?.span.end;
        let mut words = words.into_iter();
        Some(Self {
            program,
            name: words.next()?,
            arguments: words,
            span,
        })
    }

    fn error(&self, span: Range<usize>, message: impl Into<String>) -> ParseError {
        ParseError::new(self.program, span, message)
    }

    fn step(&mut self) -> Result<Step, ParseError> {
        let step = match self.name.text {
            "compute" => Step::Compute(self.amount("iterations, or a time")?),
            "spin" => Step::Spin {
                flag: self.name("a flag")?,
                until: self.until()?,
            },
            "pause" => {
                Step::Pause(self.number("how many PAUSE instructions", 1..u64::from(u32::MAX))?)
            }
            "set" => Step::Set(self.name("a flag")?),
            "clear" => Step::Clear(self.name("a flag")?),
            "add" => Step::Add(self.name("a flag")?),
            "lock" => Step::Lock(self.name_or("lock")?),
            "unlock" => Step::Unlock(self.name_or("lock")?),
            "barrier" => Step::Barrier(self.name_or("barrier")?),
            "sleeping-barrier" => Step::SleepingBarrier {
                vector: self.vector()?,
                name: self.name_or("barrier")?,
            },
            "ipi" => Step::Ipi {
                vcpu: self.vcpu()?,
                vector: self.vector()?,
            },
            "wait-answer" => Step::WaitAnswer,
            "shootdown" => Step::Shootdown(self.vector()?),
            "halt" => Step::Halt,
            "timer" => Step::Timer(self.amount("TSC ticks, or a time")?),
            "sleep" => Step::Sleep(self.amount("TSC ticks, or a time")?),
            "user" => Step::User,
            "kernel" => Step::Kernel,
            "mask" => Step::Mask,
            "unmask" => Step::Unmask,
            "stamp" => Step::Stamp(self.number("a slot", 0..STAMPS as u64)? as usize),
            other => {
                let message = format!("`{other}` is not a step; there are {STEPS_HINT}");
                return Err(self.error(self.name.span.clone(), message));
            }
        };
        match self.arguments.next() {
            Some(word) => {
                let message = format!(
                    "`{}` takes no `{}`; steps are separated by `;`",
                    self.name.text, word.text
                );
                Err(self.error(word.span, message))
            }
            None => Ok(step),
        }
    }

    fn argument(&mut self, what: &str) -> Result<Word<'a>, ParseError> {
        let word = self.arguments.next();
        word.ok_or_else(|| {
            self.error(
                self.span.clone(),
                format!("`{}` needs {what} after it", self.name.text),
            )
        })
    }

    fn amount(&mut self, what: &str) -> Result<Quantity, ParseError> {
        let word = self.argument(what)?;
        let amount: Quantity = word
            .text
            .parse()
            .map_err(|e| self.error(word.span.clone(), format!("{e}")))?;
        if amount.is_zero() {
            return Err(self.error(
                word.span,
                format!("`{}` needs an amount above zero", self.name.text),
            ));
        }
        Ok(amount)
    }

    fn number(&mut self, what: &str, range: Range<u64>) -> Result<u64, ParseError> {
        let word = self.argument(what)?;
        let number = match word.text.parse() {
            Ok(Quantity::Count(number)) => Some(number),
            _ => None,
        };
        number
            .filter(|number| range.contains(number))
            .ok_or_else(|| {
                let message = format!(
                    "`{}` is not {what}: a number from {} to {}",
                    word.text,
                    range.start,
                    range.end - 1
                );
                self.error(word.span, message)
            })
    }

    fn vcpu(&mut self) -> Result<usize, ParseError> {
        Ok(self.number("a vCPU", 0..MAX_VCPUS as u64)? as usize)
    }

    fn vector(&mut self) -> Result<u8, ParseError> {
        let word = self.argument("a vector")?;
        let vector = match word.text.parse() {
            Ok(Quantity::Count(number)) => u8::try_from(number).ok(),
            _ => None,
        };
        vector
            .filter(|vector| IPI_VECTORS.contains(vector))
            .ok_or_else(|| {
                let (first, last) = (IPI_VECTORS.start, IPI_VECTORS.end - 1);
                self.error(
                    word.span,
                    format!(
                        "`{}` is not a free vector: {first:#x} to {last:#x}",
                        word.text
                    ),
                )
            })
    }

    fn until(&mut self) -> Result<Until, ParseError> {
        match self.arguments.next() {
            None => Ok(Until::NonZero),
            Some(word) if word.text == "round" => Ok(Until::Round),
            Some(word) => Err(self.error(word.span, "after the flag there may only be `round`")),
        }
    }

    fn name(&mut self, what: &str) -> Result<String, ParseError> {
        let word = self.argument(what)?;
        self.valid_name(word)
    }

    fn name_or(&mut self, default: &str) -> Result<String, ParseError> {
        match self.arguments.next() {
            Some(word) => self.valid_name(word),
            None => Ok(default.into()),
        }
    }

    fn valid_name(&self, word: Word) -> Result<String, ParseError> {
        let letters = word
            .text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
        let begins = word.text.starts_with(|c: char| c.is_ascii_alphabetic());
        if !letters || !begins || word.text.len() >= SHARED_NAME_BYTES {
            let message = format!(
                "`{}` is not a name: a letter, then letters, digits, `-` or `_`, at most {} in all",
                word.text,
                SHARED_NAME_BYTES - 1
            );
            return Err(self.error(word.span, message));
        }
        Ok(word.text.into())
    }
}

/// What is known at one place of a program about its mode, its locks and its IPIs.
#[derive(Clone, Default)]
struct Rules {
    user: bool,
    masked: bool,
    held: BTreeSet<String>,
    ipi_sent: bool,
}

impl Rules {
    /// Whether `step` may come here; what holds after it.
    fn allow(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Ipi { .. }
            | Step::Shootdown(_)
            | Step::SleepingBarrier { .. }
            | Step::Halt
            | Step::Timer(_)
            | Step::Sleep(_)
            | Step::Mask
            | Step::Unmask
                if self.user =>
            {
                Err("this step needs kernel mode: put `kernel` before it".into())
            }
            Step::Halt | Step::Sleep(_) | Step::SleepingBarrier { .. } | Step::User
                if self.masked =>
            {
                Err("interrupts are masked here: put `unmask` before it".into())
            }
            Step::Mask if self.masked => Err("interrupts are masked already".into()),
            Step::Unmask if !self.masked => Err("interrupts are not masked here".into()),
            Step::Mask | Step::Unmask => {
                self.masked = !self.masked;
                Ok(())
            }
            Step::Ipi { .. } => {
                self.ipi_sent = true;
                Ok(())
            }
            Step::WaitAnswer if !self.ipi_sent => {
                Err("there is no `ipi` before this to be answered".into())
            }
            Step::Lock(name) if !self.held.insert(name.clone()) => Err(format!(
                "the lock `{name}` is held here already: the vCPU would wait for itself for ever"
            )),
            Step::Unlock(name) if !self.held.remove(name) => {
                Err(format!("the lock `{name}` is not held here"))
            }
            Step::User if self.user => Err("the vCPU is in user mode already".into()),
            Step::Kernel if !self.user => Err("the vCPU is in kernel mode already".into()),
            Step::User | Step::Kernel => {
                self.user = !self.user;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Whether a loop that began with the rules `start` may begin again here.
    fn allow_repeating(&self, start: &Self) -> Result<(), String> {
        if self.user != start.user {
            let (ends, begins) = if self.user {
                ("user", "kernel")
            } else {
                ("kernel", "user")
            };
            return Err(format!(
                "the loop begins in {begins} mode but ends here in {ends} mode: end it with `{begins}`, or put \
                 `{ends}` before `{LOOP}`"
            ));
        }
        if self.masked != start.masked {
            return Err(
                "the loop changes whether interrupts are masked: end it as it begins".into(),
            );
        }
        if let Some(name) = self.held.difference(&start.held).next() {
            return Err(format!(
                "the loop ends here with the lock `{name}` held: its next pass would wait for ever"
            ));
        }
        if let Some(name) = start.held.difference(&self.held).next() {
            return Err(format!(
                "the loop gives the lock `{name}` that was taken before it: it can do so only once"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Program {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Parses a wrong program; the words at fault and the message.
    fn fault(text: &str) -> (String, String) {
        let error = text.parse::<Program>().expect_err(text);
        (text[error.span()].to_string(), error.message().to_string())
    }

    #[test]
    fn every_step_is_read() {
        let program = parse(
            "compute 10; spin go; spin go round; pause 3; set a; clear a; add a; lock; unlock; lock l; unlock l; \
             barrier; barrier b; ipi 1 0x41; wait-answer; halt; timer 5us; sleep 9; user; kernel; mask; unmask; \
             stamp 15; shootdown 0x42; sleeping-barrier 0x43 b",
        );
        assert_eq!(program.steps().len(), 25);
        assert_eq!(
            program.steps()[2],
            Step::Spin {
                flag: "go".into(),
                until: Until::Round
            }
        );
        assert_eq!(program.steps()[7], Step::Lock("lock".into()));
        assert_eq!(
            program.steps()[13],
            Step::Ipi {
                vcpu: 1,
                vector: 0x41
            }
        );
        assert_eq!(
            program.steps()[16],
            Step::Timer(Quantity::Nanoseconds(5000))
        );
        assert_eq!(program.steps()[23], Step::Shootdown(0x42));
        assert_eq!(
            program.steps()[24],
            Step::SleepingBarrier {
                vector: 0x43,
                name: "b".into()
            }
        );
        assert_eq!(program.loop_start(), None);
        assert_eq!(program.highest_receiver(), Some(1));
    }

    #[test]
    fn a_loop_may_have_steps_before_it() {
        assert_eq!(parse("loop: compute 1").loop_start(), Some(0));
        assert_eq!(
            parse("user; loop: compute 1; pause 1;").loop_start(),
            Some(1)
        );
        assert_eq!(parse("set a;\n loop:\n compute 1\n").loop_start(), Some(1));
        assert_eq!(parse("set a; loop:; compute 1").loop_start(), Some(1));
    }

    #[test]
    fn errors_point_at_the_word() {
        assert_eq!(fault("compute 1; jump 3").0, "jump");
        assert_eq!(fault("loop: compute ten").0, "ten");
        assert_eq!(fault("compute 0").0, "0");
        assert_eq!(fault("set a; compute").0, "compute");
        assert_eq!(fault("halt 3").0, "3");
        assert_eq!(fault("ipi 300 0x41").0, "300");
        assert_eq!(fault("ipi 1 0x20").0, "0x20");
        assert_eq!(fault("ipi 1").0, "ipi 1");
        assert_eq!(fault("stamp 16").0, "16");
        assert_eq!(fault("set 1a").0, "1a");
        assert_eq!(fault("spin a until").0, "until");
        assert_eq!(fault("loop: halt; loop: halt").0, "loop:");
    }

    #[test]
    fn the_error_underlines_the_word() {
        let error = "loop: jump 3; halt"
            .parse::<Program>()
            .unwrap_err()
            .to_string();
        let lines: Vec<_> = error.lines().collect();
        assert!(
            lines[0].starts_with("`jump` is not a step; there are compute, spin"),
            "{error}"
        );
        assert_eq!(lines[1], "    loop: jump 3; halt");
        assert_eq!(lines[2], "          ^^^^");
    }

    #[test]
    fn an_empty_program_is_an_error() {
        for text in ["", " ; ", "loop:", "set a; loop:"] {
            assert!(
                fault(text).1.starts_with("there is no step to run here"),
                "{text}"
            );
        }
    }

    #[test]
    fn privileged_steps_need_kernel_mode() {
        for step in [
            "ipi 1 0x41",
            "shootdown 0x41",
            "sleeping-barrier 0x41",
            "halt",
            "timer 5",
            "sleep 5",
            "mask",
        ] {
            let (word, message) = fault(&format!("user; {step}"));
            assert_eq!(word, step);
            assert!(message.contains("put `kernel` before it"), "{message}");
            parse(&format!("user; kernel; {step}"));
        }
        for step in ["halt", "sleep 5", "sleeping-barrier 0x41", "user", "mask"] {
            assert_eq!(fault(&format!("mask; {step}")).0, step);
        }
        assert_eq!(fault("unmask").0, "unmask");
        assert!(
            fault("loop: mask; compute 1")
                .1
                .contains("end it as it begins")
        );
        assert_eq!(fault("user; user").0, "user");
        assert_eq!(fault("kernel").0, "kernel");
    }

    #[test]
    fn a_loop_ends_in_the_mode_and_with_the_locks_it_began_with() {
        assert!(
            fault("loop: user; compute 1")
                .1
                .contains("put `user` before `loop:`")
        );
        assert!(
            fault("user; loop: compute 1; kernel")
                .1
                .contains("end it with `user`")
        );
        assert!(
            fault("loop: lock; compute 1")
                .1
                .contains("with the lock `lock` held")
        );
        assert!(
            fault("lock; loop: unlock")
                .1
                .contains("was taken before it")
        );
        parse("lock; loop: compute 1");
    }

    #[test]
    fn locks_are_taken_once_and_given_once() {
        assert_eq!(fault("lock a; lock a").0, "lock a");
        assert_eq!(fault("unlock a").0, "unlock a");
        parse("lock a; lock b; unlock a; unlock b");
    }

    #[test]
    fn an_answer_needs_an_ipi_before_it() {
        assert_eq!(fault("loop: wait-answer; ipi 1 0x41").0, "wait-answer");
    }

    #[test]
    fn calibration_is_needed_for_computing_a_time_only() {
        assert!(parse("compute 1us").needs_calibration());
        assert!(!parse("compute 1; sleep 1us").needs_calibration());
    }
}
